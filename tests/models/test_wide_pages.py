"""Attention of prompts over wide copies of an e4m3 cache's pages, against attention over the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.models.attention import AttentionMetadata, attend
from engine.models.spec import AttentionSpec
from engine.models.wide_pages import WidePages
from kernels import BlockSparse
from kernels.widening import WIDE_PAGE
from tests.oracles.attention import Paged
from tests.support.unwritten import unwritten_is_nan

SPEC = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=32, scale=0.2, rope=None)
LENS, QUERY_LENS = [5, 200, 300, 128, 17], [1, 1, 140, 128, 2]  # two sequences decode


@pytest.mark.parametrize(
    ("shape", "widens"),
    [
        ({}, True),
        ({"window": 100}, True),
        ({"soft_cap": 3.0}, True),
        ({"alibi": tuple(0.1 * i for i in range(8))}, False),
        ({"sparse": BlockSparse(16, 2, 3, 1)}, False),
    ],
    ids=["causal", "window", "soft cap", "alibi", "sparse"],
)
def test_attention_is_that_over_the_cache(shape: dict[str, Any], widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused slots of the cache are NaN, and so is what has not been widened."""
    spec, paged = replace(SPEC, **shape), Paged.make(LENS, 16, 32, torch.float8_e4m3fn, "cpu")
    wide = WidePages.of_step(QUERY_LENS[2:], LENS[2:], spec.window, lambda tensor: tensor)
    widened, widen = [], WidePages.widen

    def counted(self: WidePages, *args: Any) -> torch.Tensor:
        widened.append(args)
        return widen(self, *args)

    monkeypatch.setattr(WidePages, "widen", counted)
    metadata = AttentionMetadata(
        num_decodes=2,
        rows=paged.rows,
        block_tables=paged.block_tables,
        query_start=torch.tensor([0, *QUERY_LENS]).cumsum(0).int(),
        context_lens=paged.context_lens,
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )
    query = torch.randn(sum(QUERY_LENS), 8, 32)
    slopes = torch.tensor(spec.alibi) if spec.alibi else None
    with unwritten_is_nan():
        want, got = (
            attend(query, paged.kv, each, spec, kv_scale=paged.kv_scale, alibi_slopes=slopes)
            for each in (metadata, replace(metadata, wide_pages=wide))
        )
    torch.testing.assert_close(got, want)
    assert len(widened) == widens


def test_no_kernel_is_compiled_anew_for_other_lengths() -> None:
    """Triton does so where a stride becomes a multiple of 16, or no longer is one."""
    for lens in ([1, 128, 129], [700, 1300, 2], [16 * WIDE_PAGE + 1, 1, 1]):
        wide = WidePages.of_step(lens, lens, 0, lambda tensor: tensor)
        assert wide.block_tables.stride(0) % 16 == 0
        assert len(wide.pages) == sum(-(-n // WIDE_PAGE) for n in lens)


def test_only_what_a_window_shows_is_widened() -> None:
    wide = WidePages.of_step([10, 200], [1000, 200], 300, lambda tensor: tensor)
    assert wide.pages.tolist() == [[0, 691], [0, 768], [0, 896], [1, 0], [1, 128]]
    assert wide.block_tables[0, 5:8].tolist() == [0, 1, 2]
    assert wide.block_tables[1, :2].tolist() == [3, 4]
