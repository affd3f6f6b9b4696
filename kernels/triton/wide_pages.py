"""Copying pages of an e4m3 KV cache to wide ones, in Triton: one program for a page and KV head."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import launch_dependents, next_power_of_2, pdl_options, wait_for_inputs


@triton.jit(do_not_specialize_on_alignment=["rows", "lens", "pages"])
def _widen_pages_kernel(
    key_cache, value_cache, keys_out, values_out, block_tables, rows, lens, pages,
    stride_table, stride_block, stride_head, stride_token,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row = pages + tl.program_id(0) * 3
    head = tl.program_id(1)
    sequence = tl.load(row)
    first = tl.load(row + 1)
    page = tl.load(row + 2)
    end = tl.load(lens + sequence)
    table = block_tables + tl.load(rows + sequence).to(tl.int64) * stride_table
    slots = tl.arange(0, PAGE)
    positions = first // PAGE * PAGE + slots
    needed = (positions >= first) & (positions < end)
    block = tl.load(table + positions // BLOCK_SIZE, mask=needed, other=0).to(tl.int64)
    d = tl.arange(0, D_PAD)[None, :]
    source = (block * stride_block + positions % BLOCK_SIZE * stride_token)[:, None] + head * stride_head + d
    mask = needed[:, None] & (d < HEAD_DIM)
    k = tl.load(key_cache + source, mask=mask, other=0.0)
    v = tl.load(value_cache + source, mask=mask, other=0.0)
    target = (page * NUM_KV_HEADS + head).to(tl.int64) * (PAGE * HEAD_DIM) + slots[:, None] * HEAD_DIM + d
    mask = (positions < end)[:, None] & (d < HEAD_DIM)
    tl.store(keys_out + target, k.to(keys_out.dtype.element_ty), mask=mask)
    tl.store(values_out + target, v.to(values_out.dtype.element_ty), mask=mask)


def widen_pages(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    lens: Tensor,
    pages: Tensor,
    out: Tensor,
) -> None:
    """See `kernels.reference.widen_pages`. `out` and `pages` must be contiguous, a page of `out` 2^n slots."""
    _, _, num_kv_heads, page, head_dim = out.shape
    assert key_cache.dtype == torch.float8_e4m3fn
    assert key_cache.stride() == value_cache.stride()
    assert key_cache.stride(3) == 1
    assert out.is_contiguous()
    assert pages.is_contiguous()
    if len(pages):
        _widen_pages_kernel[(len(pages), num_kv_heads)](
            key_cache, value_cache, out[0], out[1], block_tables, rows, lens, pages,
            block_tables.stride(0), *key_cache.stride()[:3],
            NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, D_PAD=next_power_of_2(head_dim), PAGE=page,
            BLOCK_SIZE=key_cache.shape[2], num_warps=4 if head_dim <= 128 else 8, **pdl_options(key_cache.device),
        )  # fmt: skip
