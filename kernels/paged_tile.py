"""Device code shared by the attention kernels: one tile of keys and values, gathered through a block table."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_kv_tile(
    key_base, value_base, table, start, context_len, stride_block, stride_token,
    TILE: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """K transposed [D_PAD, TILE] and V [TILE, D_PAD] of the keys [start, start + TILE) of one sequence and KV head.

    Unmasked, every key must lie inside the context. Masked, slots beyond it are read as 0, whatever they hold.
    """
    positions = start + tl.arange(0, TILE)
    d = tl.arange(0, D_PAD)
    if PAGE % TILE == 0:  # the tile lies in one block
        block = tl.load(table + start // PAGE).to(tl.int64)
    elif MASKED:
        block = tl.load(table + positions // PAGE, mask=positions < context_len, other=0).to(tl.int64)
    else:
        block = tl.load(table + positions // PAGE).to(tl.int64)
    offsets = block * stride_block + (positions % PAGE) * stride_token
    key_at = key_base + offsets[None, :] + d[:, None]
    value_at = value_base + offsets[:, None] + d[None, :]
    if MASKED:
        inside = positions < context_len
        k = tl.load(key_at, mask=inside[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(value_at, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM != D_PAD:
        k = tl.load(key_at, mask=(d < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(value_at, mask=(d < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(key_at)
        v = tl.load(value_at)
    return k, v


@triton.jit
def soft_capped(scores, SOFT_CAP: tl.constexpr):
    """SOFT_CAP * tanh(scores / SOFT_CAP), with a tanh that does not overflow."""
    return SOFT_CAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / SOFT_CAP)) + 1.0))


@triton.jit
def fold(scores, v, acc, m, l, PRECISION: tl.constexpr):
    """One online-softmax update: base-2 scores [M, N] and values [N, D] into acc [M, D], running maximum m and sum l [M]."""
    new_m = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(new_m == -float("inf"), 0.0, new_m)  # every key so far is masked
    p = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(m - base)
    l = l * rescale + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_m, l
