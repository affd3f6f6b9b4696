"""Time that upcast copies of an e4m3 cache would save."""

import random

import pytest
import torch

from kernels.data.widening import WIDE_PAGE, can_gain, first_needed, num_pairs, num_wide_pages, seconds_saved

K = 1024


def test_what_queries_see() -> None:
    for _ in range(500):
        context = random.randint(1, 3 * WIDE_PAGE)
        queries, window = random.randint(1, context), random.choice([0, random.randint(1, 4 * WIDE_PAGE)])
        seen = [range(max(p + 1 - window, 0) if window else 0, p + 1) for p in range(context - queries, context)]
        assert num_pairs([queries], [context], window) == sum(map(len, seen))
        assert first_needed(queries, context, window) == seen[0].start
        pages = {position // WIDE_PAGE for keys in seen for position in keys}
        assert num_wide_pages([queries], [context], window) == len(pages)
    assert num_pairs([2, 3], [2, 9], 0) == 3 + 7 + 8 + 9
    assert num_wide_pages([2, 3], [2, 2 * WIDE_PAGE + 1], 0) == 4


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "window", "head_dim", "expected"),
    [
        ([8 * K], [8 * K], 0, 128, True),
        ([2 * K] * 4, [2 * K] * 4, 0, 128, True),
        ([K // 2] * 16, [K // 2] * 16, 0, 128, True),  # each key has 256 queries on average
        ([K // 2] * 16, [K] * 16, 0, 128, True),
        ([K // 4] * 32, [K // 4] * 32, 0, 128, False),
        ([K // 2] * 16, [2 * K] * 16, K // 4, 128, False),  # most of what is seen is older
        ([K // 2] * 16, [K // 2] * 16, 0, 64, True),
        ([K // 4] * 32, [K // 4] * 32, 0, 64, False),
        ([K] * 8, [K] * 8, 0, 256, True),
        ([8 * K], [32 * K], 0, 128, True),
        ([16], [32 * K], 0, 128, False),
        ([8 * K], [32 * K], 2 * K, 128, True),
        ([8 * K], [32 * K], 128, 128, False),
    ],
)
def test_many_queries_for_each_key_are_worth_it(
    query_lens: list[int], context_lens: list[int], window: int, head_dim: int, expected: bool
) -> None:
    assert (seconds_saved(query_lens, context_lens, window, 32, 8, head_dim) > 0) is expected


def test_which_heads_gain() -> None:
    bfloat16, float32 = torch.bfloat16, torch.float32
    for shape in ((32, 8, 128), (28, 4, 128), (16, 8, 256), (64, 8, 64), (8, 8, 80), (4, 1, 112)):
        assert can_gain((9, 0), *shape, bfloat16)
    for shape in ((32, 8, 48), (32, 8, 512), (40, 8, 128), (32, 8, 136)):
        assert not can_gain((9, 0), *shape, bfloat16)
    assert not can_gain((9, 0), 32, 8, 128, float32)
    assert not can_gain((10, 0), 32, 8, 128, bfloat16)
    assert not can_gain(None, 32, 8, 128, bfloat16)
