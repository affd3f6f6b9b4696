"""Copying pages of an e4m3 cache to wide ones, in Triton's interpreter, and prefill attention over them."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.models.wide_pages import WidePages
from kernels import reference
from kernels.cuda import attention
from kernels.data.widening import WIDE_PAGE
from kernels.triton import wide_pages
from tests.oracles.attention import Paged, exact_attention
from tests.support.attention_calls import spread
from tests.support.paged import as_a_layer_of_one_tensor

E4M3 = torch.float8_e4m3fn
LENS, QUERY_LENS = [1, 300, 128, 257, 17], [1, 70, 128, 9, 17]


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def steps_pages(lens: list[int], query_lens: list[int], window: int = 0) -> WidePages:
    return WidePages.of_step(query_lens, lens, window, lambda tensor: tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", [wide_pages, reference], ids=["triton", "reference"])
def test_every_code_stays_the_number_it_is(module: Any, dtype: torch.dtype, exact_float8: None) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    keys = codes.view(1, 1, 16, 16)
    values = codes.view(torch.uint8).flip(0).view(E4M3).view(1, 1, 16, 16)
    one, lens = torch.zeros(1, dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    out = torch.empty(2, 1, 1, 32, 16, dtype=dtype)
    module.widen_pages(keys, values, one.view(1, 1), one, lens, torch.zeros(1, 3, dtype=torch.int32), out)
    for got, cache in zip(out, (keys, values), strict=True):
        torch.testing.assert_close(got[0, 0, :16].double(), cache[0, 0].double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layer", [False, True], ids=["contiguous", "a layer of one tensor"])
@pytest.mark.parametrize("window", [0, 100, 128])
@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 16), (80, 64), (256, 8), (16, 256)])
def test_pages_of_ragged_contexts(head_dim: int, block_size: int, window: int, layer: bool, exact_float8: None) -> None:
    """Slots outside the contexts hold NaN, also in `out`; blocks before the windows are out of the cache."""
    paged = Paged.make(LENS, block_size, head_dim, E4M3, "cpu")
    wide = steps_pages(LENS, QUERY_LENS, window)
    if window:
        for row, n, q in zip(paged.rows.tolist(), LENS, QUERY_LENS, strict=True):
            paged.block_tables[row, : max(n - q + 1 - window, 0) // block_size] = 2**30
    kv = as_a_layer_of_one_tensor(paged.kv) if layer else paged.kv
    shape = (2, len(wide.pages), 2, WIDE_PAGE, head_dim)
    got, want = (torch.full(shape, float("nan"), dtype=torch.bfloat16) for _ in "ab")
    for widen, out in ((wide_pages.widen_pages, got), (reference.widen_pages, want)):
        widen(kv[0], kv[1], paged.block_tables, paged.rows, paged.context_lens, wide.pages, out)
    assert bits(got).equal(bits(want))
    page = int(wide.block_tables[1, 2])  # of the sequence of 300, its last 44 positions
    assert got[:, page, :, :44].isfinite().all()
    assert got[:, page, :, 44:].isnan().all()


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 100}, {"soft_cap": 3.0}, {"sinks": torch.randn(8)}, {"window": 9, "soft_cap": 3.0}],
    ids=lambda options: "+".join(options) or "causal",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prefill_is_that_over_the_cache(dtype: torch.dtype, options: dict[str, Any], exact_float8: None) -> None:
    """With scales of each head. What has not been written is NaN."""
    paged = Paged.make(LENS, 16, 32, E4M3, "cpu")
    wide = steps_pages(LENS, QUERY_LENS, options.get("window", 0))
    starts = torch.tensor([0, *QUERY_LENS]).cumsum(0).int()
    query = torch.randn(sum(QUERY_LENS), 8, 32).to(dtype)
    key_pages, value_pages = wide_through_triton(wide, paged, dtype)
    more: dict[str, Any] = {"scale": 0.2, "kv_scale": paged.kv_scale, **options}
    got = spread(attention.paged_attention_prefill)(
        query, key_pages, value_pages, wide.block_tables, wide.rows, starts, paged.context_lens, **more
    )
    direct = spread(attention.paged_attention_prefill)(
        query, paged.kv[0], paged.kv[1], paged.block_tables, paged.rows, starts, paged.context_lens, **more
    )
    want = exact_attention(query, paged, QUERY_LENS, 0.2, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
    if dtype == torch.float32:
        assert got.equal(direct)
    torch.testing.assert_close(got, direct, atol=tolerance, rtol=tolerance)


def wide_through_triton(wide: WidePages, paged: Paged, dtype: torch.dtype) -> Tensor:
    out = torch.empty(2, len(wide.pages), 2, WIDE_PAGE, paged.kv.shape[4], dtype=dtype)
    wide_pages.widen_pages(
        paged.kv[0], paged.kv[1], paged.block_tables, paged.rows, paged.context_lens, wide.pages, out
    )
    return out
