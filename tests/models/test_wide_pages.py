"""Attention of prompts over wide copies of an e4m3 cache's pages, against attention over the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.models.attention import Attention, AttentionMetadata
from engine.models.formats.floats import FLOATS
from engine.models.matrix import Scope
from engine.models.residual import ResidualEpilogue, ResidualStream, SublayerInput
from engine.models.spec import AttentionSpec
from engine.models.wide_pages import WidePages
from kernels import BlockSparse
from kernels.data.widening import WIDE_PAGE
from tests.oracles.attention import Paged
from tests.support.unwritten import unwritten_is_nan

SPEC = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=32, scale=0.2, rope=None)
LENS, QUERY_LENS = [5, 200, 300, 128, 17], [1, 1, 140, 128, 2]  # two sequences decode
HIDDEN = 64


@pytest.mark.parametrize(
    ("shape", "widens"),
    [
        ({}, True),
        ({"window": 100}, True),
        ({"window": 1}, True),
        ({"soft_cap": 3.0}, True),
        ({"kv_of": 0}, True),
        ({"kv_of": 0, "window": 100}, True),
        ({"alibi": tuple(0.1 * i for i in range(8))}, False),
        ({"sparse": BlockSparse(16, 2, 3, 1)}, False),
    ],
    ids=lambda shape: ", ".join(shape) or "causal" if isinstance(shape, dict) else "",
)
def test_attention_is_that_over_the_cache(shape: dict[str, Any], widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused slots of the cache are NaN, and so are unwritten slots. Sequences 2 and 3 have older tokens or none."""
    spec, paged = replace(SPEC, **shape), Paged.make(LENS, 16, 32, torch.float8_e4m3fn, "cpu")
    attention = layer(spec)
    assert paged.kv_scale is not None
    attention.kv_scale.copy_(paged.kv_scale)
    wide = WidePages.of_step(QUERY_LENS[2:], LENS[2:], spec.window, lambda tensor: tensor, num_others=2)
    made = []
    allocate = WidePages.allocate

    def counted(*args: Any) -> Any:
        made.append(args)
        return allocate(*args)

    monkeypatch.setattr(WidePages, "allocate", counted)
    metadata = AttentionMetadata(
        num_decodes=2,
        rows=paged.rows,
        block_tables=paged.block_tables,
        query_start=torch.tensor([0, *QUERY_LENS]).cumsum(0).int(),
        context_lens=paged.context_lens,
        slot_mapping=paged.newest(QUERY_LENS)[2],
    )
    x, positions = torch.randn(sum(QUERY_LENS), HIDDEN), torch.zeros(sum(QUERY_LENS), dtype=torch.int64)
    found, caches = [], []
    for each in (metadata, replace(metadata, prefill_kv=wide)):
        hidden, kv = x.clone(), paged.kv.clone()
        with unwritten_is_nan():
            stream = attention(SublayerInput(hidden), ResidualEpilogue(ResidualStream(hidden)), positions, kv, each)
        found.append(stream.hidden)
        caches.append(kv.view(torch.uint8))
    torch.testing.assert_close(found[1], found[0])
    assert caches[1].equal(caches[0])
    assert caches[0].equal(paged.kv.view(torch.uint8)) == (spec.kv_of is not None), "such a layer stores nothing"
    assert len(made) == widens


def layer(spec: AttentionSpec) -> Attention:
    scope = Scope(torch.float32, torch.device("cpu"), FLOATS)
    attention = Attention(spec, HIDDEN, None, lambda *_: pytest.fail("there is no norm"), scope)
    for linear in (attention.qkv, attention.o):
        assert isinstance(linear.weight, torch.Tensor)
        linear.weight.copy_(torch.randn(linear.weight.shape) * 0.1)
        linear.pack()
    return attention


def test_no_kernel_is_compiled_anew_for_other_lengths() -> None:
    """Triton does so where a stride becomes a multiple of 16, or no longer is one."""
    for lens in ([1, 128, 129], [700, 1300, 2], [16 * WIDE_PAGE + 1, 1, 1]):
        wide = WidePages.of_step(lens, lens, 0, lambda tensor: tensor)
        assert wide.block_tables.stride(0) % 16 == 0
        assert len(wide.pages) == sum(-(-n // WIDE_PAGE) for n in lens)


def test_only_what_a_window_shows_is_widened() -> None:
    wide = WidePages.of_step([10, 200], [1000, 200], 300, lambda tensor: tensor, num_others=3, num_tokens=220)
    assert wide.pages.tolist() == [[0, 691, 0], [0, 768, 1], [0, 896, 2], [1, 0, 3], [1, 128, 4]]
    assert wide.block_tables[0, 5:8].tolist() == [0, 1, 2]
    assert wide.block_tables[1, :2].tolist() == [3, 4]
    assert wide.old_lens.tolist() == [990, 0]
    assert wide.old_pages.tolist() == wide.pages[:3].tolist(), "the second prompt has no older tokens"
    new = [*range(2 * 128 + 990 - 896, 2 * 128 + 1000 - 896), *range(3 * 128, 3 * 128 + 200)]
    assert wide.slots.tolist() == [-1] * 3 + new + [-1] * 7
