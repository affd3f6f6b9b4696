"""LoRA of embeddings and output heads in Triton. What the CPU launches does not depend on the adapters of a step."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.lora import AdapterTokens, EmbeddingLora, RetrainedRows
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs

BLOCK_CHANNELS = 64  # of an embedding, of a program
MAX_RANKS = 64  # that it multiplies at a time
BLOCK_ROWS = 64  # retrained rows of a program


@triton.jit
def _embedding_lora_kernel(
    y, ids, slots, down, up, rows, indices, first, stride_down, stride_up, stride_rows, stride_indices,
    V: tl.constexpr, H: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token, BLOCK channels of y [T, H], in place. See `kernels.reference.adapt_embedding`."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    slot, local = tl.load(slots + token).to(tl.int64), tl.load(ids + token) - first
    if (slot >= 0) & (local >= 0) & (local < V):
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_n = n < H
        place = tl.load(indices + slot * stride_indices + local).to(tl.int64)
        total = tl.load(y + token * H + n, mask=is_n & (place == 0), other=0.0).to(tl.float32)
        retrained = rows + slot * stride_rows + (place - 1) * H + n
        total += tl.load(retrained, mask=is_n & (place > 0), other=0.0).to(tl.float32)
        for at in tl.static_range(0, RANK, BLOCK_R):
            rank = at + tl.arange(0, BLOCK_R)
            a = tl.load(down + slot * stride_down + local * RANK + rank, mask=rank < RANK, other=0.0).to(tl.float32)
            b = tl.load(
                up + slot * stride_up + n.to(tl.int64)[:, None] * RANK + rank[None, :],
                mask=is_n[:, None] & (rank < RANK)[None, :], other=0.0,
            )  # fmt: skip
            total += tl.sum(b.to(tl.float32) * a[None, :], 1)
        tl.store(y + token * H + n, total.to(y.dtype.element_ty), mask=is_n)


def adapt_embedding(y: Tensor, ids: Tensor, weights: EmbeddingLora, tokens: AdapterTokens) -> Tensor:
    """See `kernels.reference.adapt_embedding`."""
    assert y.is_contiguous()
    (_, vocab, rank), hidden = weights.down.shape, y.shape[1]
    _embedding_lora_kernel[len(y), cdiv(hidden, BLOCK_CHANNELS)](
        y, ids, tokens.slots, weights.down, weights.up, weights.rows, weights.indices, weights.first,
        weights.down.stride(0), weights.up.stride(0), weights.rows.stride(0), weights.indices.stride(0),
        V=vocab, H=hidden, RANK=rank, BLOCK=BLOCK_CHANNELS, BLOCK_R=min(next_power_of_2(rank), MAX_RANKS),
        num_warps=4, **pdl_options(y.device),
    )  # fmt: skip
    return y


@triton.jit
def _retrained_kernel(
    y, x, rows, ids, order, tiles, stride_y, stride_x, stride_rows, stride_ids,
    N: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile's logits of BLOCK_N retrained rows, written over those of the base. See `kernels.reference`."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    slot = tl.load(tiles + tl.program_id(1) * 3).to(tl.int64)
    if slot >= 0:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        column = tl.load(ids + slot * stride_ids + n, mask=n < N, other=0)
        if tl.max(column, 0) > 0:
            row = tl.load(tiles + tl.program_id(1) * 3 + 1) + tl.arange(0, TILE)
            is_row = row < tl.load(tiles + tl.program_id(1) * 3 + 2)
            token = tl.load(order + row, mask=is_row, other=0).to(tl.int64)
            k = tl.arange(0, BLOCK_K)
            w = rows + slot * stride_rows + n.to(tl.int64)[:, None] * K
            acc = tl.zeros([TILE, BLOCK_N], tl.float32)
            for at in range(0, K, BLOCK_K):
                is_k = (k + at < K)[None, :]
                xk = tl.load(x + token[:, None] * stride_x + (k + at)[None, :], mask=is_row[:, None] & is_k, other=0.0)
                wk = tl.load(w + (k + at)[None, :], mask=(column > 0)[:, None] & is_k, other=0.0)
                acc = tl.dot(xk, tl.trans(wk), acc, input_precision=PRECISION)
            to = y + token[:, None] * stride_y + (column - 1)[None, :]
            tl.store(to, acc.to(y.dtype.element_ty), mask=is_row[:, None] & (column > 0)[None, :])


def retrained_logits(y: Tensor, x: Tensor, weights: RetrainedRows, tokens: AdapterTokens) -> Tensor:
    """See `kernels.reference.retrained_logits`. Rows of x and y must be contiguous, their row strides are free."""
    assert x.stride(1) == y.stride(1) == 1
    order, tiles, tile = tokens.tiles
    _, count, hidden = weights.rows.shape
    _retrained_kernel[cdiv(count, BLOCK_ROWS), len(tiles)](
        y, x, weights.rows, weights.ids, order, tiles, y.stride(0), x.stride(0), weights.rows.stride(0),
        weights.ids.stride(0), N=count, K=hidden, TILE=tile, BLOCK_N=BLOCK_ROWS,
        BLOCK_K=32 if x.dtype == torch.float32 else 64, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4, **pdl_options(y.device),
    )  # fmt: skip
    return y
