"""LoRA in Triton: two kernels for all adapters of a step, A and then B.

Tokens are sorted by slot in tiles on the device (`AdapterTokens`), so nothing that the CPU sees depends on the adapters
of a step, and a CUDA graph can hold both kernels. A · x is divided along the channels among programs; B's kernel adds
their partial sums, always in the same order.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.lora import BLOCK_ROWS, LARGE_STEP, AdapterTokens, LoraWeights
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs

MIN_CHANNELS = 256  # that a program of A multiplies
MAX_RANKS = 64  # rows of A of a program
# Partial sums of A · x, so that enough programs read A: for steps of at most so many tokens. B's kernel loads all of a
# tile at once.
SPLITS = ((64, 16), (256, 8), (LARGE_STEP - 1, 4))
LARGE_SPLITS = 2


@triton.jit
def _down_kernel(
    x, down, order, tiles, out, stride_x, stride_slot, stride_split, channels,
    NUM_RANKS: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [splits, T, NUM_RANKS], in the order of tiles: partial sums of x [T, K] · A [NUM_RANKS, K], float32."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    tile, split = tl.program_id(0), tl.program_id(2)
    slot = tl.load(tiles + tile * 3)
    if slot >= 0:
        first, end = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        row = first + tl.arange(0, TILE)
        is_row = row < end
        token = tl.load(order + row, mask=is_row, other=0).to(tl.int64)
        rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        is_rank = rank < NUM_RANKS
        k = split * channels + tl.arange(0, BLOCK_K)
        stop = tl.minimum(split * channels + channels, K)
        a = down + slot.to(tl.int64) * stride_slot + rank.to(tl.int64)[:, None] * K
        acc = tl.zeros([TILE, BLOCK_R], tl.float32)
        for at in range(0, channels, BLOCK_K):
            is_k = (k + at < stop)[None, :]
            xk = tl.load(x + token[:, None] * stride_x + (k + at)[None, :], mask=is_row[:, None] & is_k, other=0.0)
            ak = tl.load(a + (k + at)[None, :], mask=is_rank[:, None] & is_k, other=0.0)
            acc = tl.dot(xk, tl.trans(ak), acc, input_precision=PRECISION)
        to = out + split * stride_split + row.to(tl.int64)[:, None] * NUM_RANKS + rank[None, :]
        tl.store(to, acc, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["splits"])
def _up_kernel(
    y, inner, up, factor, shift, order, tiles, blocks, stride_y, stride_up, stride_factor, stride_split, splits,
    NUM_RANKS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, N] → factor · y + B · (sum of inner's partial sums) + shift, in place. SPLITS: a power of two, at least
    splits.
    """
    if PDL:
        launch_dependents()
        wait_for_inputs()
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + tile * 3).to(tl.int64)
    if slot >= 0:
        first, end = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        row = first + tl.arange(0, TILE)
        is_row = row < end
        token = tl.load(order + row, mask=is_row, other=0).to(tl.int64)
        n = tl.load(blocks + block * 3) + tl.arange(0, BLOCK_N)
        is_n = n < tl.load(blocks + block * 3 + 1)
        group = tl.load(blocks + block * 3 + 2)
        acc = tl.zeros([TILE, BLOCK_N], tl.float32)
        for at in tl.static_range(0, RANK, BLOCK_R):
            rank = at + tl.arange(0, BLOCK_R)
            is_rank = rank < RANK
            mask = is_row[:, None] & is_rank[None, :]
            part = inner + row.to(tl.int64)[:, None] * NUM_RANKS + (group * RANK + rank)[None, :]
            split = tl.arange(0, SPLITS)[:, None, None]
            u = tl.sum(tl.load(part[None] + split * stride_split, mask=mask[None] & (split < splits), other=0.0), 0)
            b = tl.load(
                up + slot * stride_up + n.to(tl.int64)[:, None] * RANK + rank[None, :],
                mask=is_n[:, None] & is_rank[None, :], other=0.0,
            )  # fmt: skip
            acc = tl.dot(u.to(b.dtype), tl.trans(b), acc, input_precision=PRECISION)
        mask = is_row[:, None] & is_n[None, :]
        to = y + token[:, None] * stride_y + n[None, :]
        scale = tl.load(factor + slot * stride_factor + n, mask=is_n, other=0.0)
        added = tl.load(shift + slot * stride_factor + n, mask=is_n, other=0.0)
        result = tl.load(to, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + acc + added[None, :]
        tl.store(to, result.to(y.dtype.element_ty), mask=mask)


def lora_add(y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> Tensor:
    """See `kernels.reference.lora_add`. Rows of x and y must be contiguous, their row strides are free."""
    assert x.stride(1) == y.stride(1) == 1
    assert weights.factor.stride() == weights.shift.stride()
    num_ranks, channels = weights.down.shape[1:]
    rank, (order, tiles, tile) = weights.rank, tokens.tiles
    num_tiles = len(tiles)
    wanted = next((splits for tokens, splits in SPLITS if len(x) <= tokens), LARGE_SPLITS)
    block_channels = 64 if x.dtype == torch.float32 else 128
    own = cdiv(max(cdiv(channels, wanted), MIN_CHANNELS), block_channels) * block_channels
    splits = cdiv(channels, own)
    block_ranks = min(max(next_power_of_2(num_ranks), 16), MAX_RANKS)
    num_parts = cdiv(num_ranks, block_ranks)
    inner = torch.empty(splits, len(x), num_ranks, dtype=torch.float32, device=x.device)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    options = pdl_options(x.device)
    _down_kernel[num_tiles, num_parts, splits](
        x, weights.down, order, tiles, inner, x.stride(0), weights.down.stride(0), inner.stride(0), own,
        NUM_RANKS=num_ranks, K=channels, TILE=tile, BLOCK_R=block_ranks, BLOCK_K=block_channels, PRECISION=precision,
        num_warps=4, **options,
    )  # fmt: skip
    padded = next_power_of_2(splits)
    block_ranks = max(min(next_power_of_2(rank), 256 // padded, MAX_RANKS), 16)
    _up_kernel[num_tiles, len(weights.blocks)](
        y, inner, weights.up, weights.factor, weights.shift, order, tiles, weights.blocks,
        y.stride(0), weights.up.stride(0), weights.factor.stride(0), inner.stride(0), splits,
        NUM_RANKS=num_ranks, RANK=rank, SPLITS=padded, TILE=tile, BLOCK_N=BLOCK_ROWS, BLOCK_R=block_ranks,
        PRECISION=precision, num_warps=4, **options,
    )  # fmt: skip
    return y
