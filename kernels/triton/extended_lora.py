"""LoRA after one GEMM of a layer's weight and of A of all slots: what is left is B · (A · x), in one kernel.

A · x of every slot costs that GEMM a few more rows: 64 beside the 4,096 of an output projection with four slots of rank
16. So no kernel reads x again, and none waits for another one's partial sums.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.activation import Gate
from kernels.data.lora import BLOCK_ROWS, WIDE_ROWS, AdapterTokens, LoraWeights
from kernels.gpu.launch import launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.triton.activation import activate

MAX_RANKS = 64  # that a program multiplies at a time


@triton.jit
def _changed(
    y, inner, up, factor, shift, slot, n, is_row, is_n, group, stride_up, stride_factor,
    RANK: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """factor · y + B · inner + shift of a tile's tokens and y's channels n: [TILE, BLOCK_N] float32. y, inner:
    pointers to the tokens' rows.
    """
    mask = is_row[:, None] & is_n[None, :]
    before = tl.load(y[:, None] + n[None, :], mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros([TILE, BLOCK_N], tl.float32)
    if slot >= 0:
        scale = tl.load(factor + slot * stride_factor + n, mask=is_n, other=0.0)
        added = tl.load(shift + slot * stride_factor + n, mask=is_n, other=0.0)
        for at in tl.static_range(0, RANK, BLOCK_R):
            rank = at + tl.arange(0, BLOCK_R)
            is_rank = rank < RANK
            is_u = is_row[:, None] & is_rank[None, :]
            u = tl.load(inner[:, None] + (group * RANK + rank)[None, :], mask=is_u, other=0.0)
            b = tl.load(
                up + slot * stride_up + n.to(tl.int64)[:, None] * RANK + rank[None, :],
                mask=is_n[:, None] & is_rank[None, :], other=0.0,
            )  # fmt: skip
            acc = tl.dot(u.to(b.dtype), tl.trans(b), acc, input_precision=PRECISION)
        before = before * scale[None, :] + acc + added[None, :]
    return before


@triton.jit
def _extended_kernel(
    y, out, up, factor, shift, order, tiles, blocks, stride_y, stride_out, stride_up, stride_factor,
    N: tl.constexpr, HALF: tl.constexpr, NUM_RANKS: tl.constexpr, RANK: tl.constexpr, UP_GROUP: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [T, N] = factor · y + B · u + shift, or y for tokens without an adapter; u of y [T, N + S · NUM_RANKS].

    GATE "silu", "gelu_tanh": out [T, HALF] = activation(gate) · up; up rows use the A of UP_GROUP.
    """
    if PDL:
        launch_dependents()
        wait_for_inputs()
    tile, block = tl.program_id(1), tl.program_id(0)
    slot = tl.load(tiles + tile * 3).to(tl.int64)
    if slot >= -1:  # else an unused tile
        row = tl.load(tiles + tile * 3 + 1) + tl.arange(0, TILE)
        is_row = row < tl.load(tiles + tile * 3 + 2)
        token = tl.load(order + row, mask=is_row, other=0).to(tl.int64)
        if GATE == "":
            n = tl.load(blocks + block * 3) + tl.arange(0, BLOCK_N)
            is_n = n < tl.load(blocks + block * 3 + 1)
            group = tl.load(blocks + block * 3 + 2)
        else:
            n = block * BLOCK_N + tl.arange(0, BLOCK_N)
            is_n = n < HALF
            group = 0
        own = y + token * stride_y
        inner = own + N + slot * NUM_RANKS
        result = _changed(
            own, inner, up, factor, shift, slot, n, is_row, is_n, group, stride_up, stride_factor, RANK, TILE, BLOCK_N,
            BLOCK_R, PRECISION,
        )  # fmt: skip
        if GATE != "":
            value = _changed(
                own, inner, up, factor, shift, slot, n + HALF, is_row, is_n, UP_GROUP, stride_up, stride_factor, RANK,
                TILE, BLOCK_N, BLOCK_R, PRECISION,
            )  # fmt: skip
            gate = result.to(y.dtype.element_ty).to(tl.float32)  # as separate kernels round
            value = value.to(y.dtype.element_ty).to(tl.float32)
            result = activate(gate, GATE).to(y.dtype.element_ty).to(tl.float32) * value
        to = out + token[:, None] * stride_out + n[None, :]
        tl.store(to, result.to(y.dtype.element_ty), mask=is_row[:, None] & is_n[None, :])


def gates(weights: LoraWeights, rows: int = BLOCK_ROWS) -> bool:
    """Return whether `expand_extended` computes the gated activation of a layer with these adapters."""
    half = weights.factor.shape[1] // 2
    return half % rows == 0 and [group.start for group in weights.groups] in ([0], [0, half])


def expand_extended(
    y: Tensor, weights: LoraWeights, tokens: AdapterTokens, gate: Gate | None = None, *, rows: int = BLOCK_ROWS
) -> Tensor:
    """Return a layer's result [T, out] with each token's adapter; with `gate`, see `gates`, the gated activation
    [T, out / 2].

    y [T, out + S · G · R]: x · `LoraWeights.extended`ᵀ. Rows must be contiguous, the row stride is free. rows: of the
    result that a program computes, `BLOCK_ROWS` or `WIDE_ROWS`.
    """
    assert y.stride(1) == 1
    assert weights.factor.stride() == weights.shift.stride()
    order, tiles, tile = tokens.tiles
    n, rank = weights.factor.shape[1], weights.rank
    blocks = weights.wide_blocks if rows == WIDE_ROWS else weights.blocks
    width, num_blocks = (n, len(blocks)) if gate is None else (n // 2, n // 2 // rows)
    out = torch.empty(len(y), width, dtype=y.dtype, device=y.device)
    _extended_kernel[num_blocks, len(tiles)](
        y, out, weights.up, weights.factor, weights.shift, order, tiles, blocks, y.stride(0), out.stride(0),
        weights.up.stride(0), weights.factor.stride(0),
        N=n, HALF=n // 2, NUM_RANKS=weights.down.shape[1], RANK=rank, UP_GROUP=len(weights.groups) - 1, TILE=tile,
        BLOCK_N=rows, BLOCK_R=max(min(next_power_of_2(rank), MAX_RANKS), 16), GATE=gate or "",
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32", num_warps=8 if rows == WIDE_ROWS else 4,
        **pdl_options(y.device),
    )  # fmt: skip
    return out
