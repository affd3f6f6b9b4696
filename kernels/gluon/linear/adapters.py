"""LoRA within a GEMM of few tokens: the first programs of its launch compute A · x, all others add B times that.

The others load B, and A · x once it is complete, when they have requested the last of their weights: so they wait for
both at once. The first programs have all been started when others are, so none of these waits for a program that finds
no place.
"""

# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.data.lora import AdapterTokens, LoraWeights
from kernels.gluon.common.layouts import barrier
from kernels.gpu.launch import cdiv, wait_for_inputs

ROWS = gl.constexpr(16)  # of A that a program computes, and of B's columns that are added at a time
BLOCK_K = gl.constexpr(512)
FEW_TOKENS = 2  # up to which more programs share a token's channels
MAX_RANK, MAX_GROUPS = 64, 3
NEVER = gl.constexpr(1 << 30)  # no row


class Adapters(NamedTuple):
    """Adapters of a launch, of y = W · x: y → factor · y + B · (A · x) + shift of each token's slot."""

    weights: LoraWeights
    tokens: AdapterTokens  # M


@gluon.jit
def shrink(
    program, x, norm_weight, slots, down, inner, arrivals, stride_x, stride_down,
    K: gl.constexpr, RANKS: gl.constexpr, PARTS: gl.constexpr, CHANNELS: gl.constexpr, WARPS: gl.constexpr,
    NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute 16 rows of A times CHANNELS channels of one token: inner [M, PARTS, RANKS] float32. With NORM, x is not
    divided by its root mean square yet.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    part = program % PARTS
    block = program // PARTS % (RANKS // ROWS)
    token = program // (PARTS * (RANKS // ROWS))
    row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    if PDL:
        wait_for_inputs()
    slot = gl.load(slots + token).to(gl.int64)
    if slot >= 0:
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
        for at in gl.static_range(0, CHANNELS, BLOCK_K):
            k = part * CHANNELS + at + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
            a = gl.load(down + slot * stride_down + row[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0.0)
            xk = gl.load(x + token * stride_x + k, mask=k < K, other=0.0).to(gl.float32)
            if NORM:
                xk *= gl.load(norm_weight + k, mask=k < K, other=0.0).to(gl.float32)
            total += gl.sum(a.to(gl.float32) * xk[None, :], 1)
        gl.store(inner + (token * PARTS + part) * RANKS + row, total)
    barrier()
    gl.atomic_add(arrivals, 1, sem="release", scope="gpu")


@gluon.jit
def load_up(
    slots, up, first, num_tokens, stride_up,
    N: gl.constexpr, USERS: gl.constexpr, BLOCK_N: gl.constexpr, RANK: gl.constexpr, GATED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Load B for rows [first, first + BLOCK_N), and with GATED for those N rows on.

    USERS: tokens, those of the GEMM's tile unless there is only one. Returns tensors [BLOCK_N, USERS, 16] of 16 columns
    each, with GATED the halves alternately; 0 for tokens without an adapter.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2], [4, 1, 8], [WARPS, 1, 1] if USERS == 1 else [1, WARPS, 1], [2, 1, 0]
    )
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    m = gl.arange(0, USERS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    slot = gl.load(slots + m, mask=m < num_tokens, other=-1).to(gl.int64)
    rows = up + slot * stride_up + (first + n) * RANK + r
    bs = ()
    for at in gl.static_range(0, RANK, ROWS):
        bs = bs + (gl.load(rows + at, mask=slot >= 0, other=0.0),)
        if GATED:
            bs = bs + (gl.load(rows + N * RANK + at, mask=slot >= 0, other=0.0),)
    return bs


@gluon.jit
def _wait_for(arrivals, count):
    """Wait until the counter is at least count. Each thread may then read what was written before: no barrier."""
    gl.inline_asm_elementwise(
        "{ .reg .pred less; .reg .s32 found; AGAIN: ld.acquire.gpu.global.s32 found, [$1]; "
        "setp.lt.s32 less, found, $2; @less bra AGAIN; mov.s32 $0, found; }",
        "=r,l,r", [arrivals.to(gl.int64), count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_inner(
    slots, inner, arrivals, num_shrink, first, num_tokens,
    N: gl.constexpr, USERS: gl.constexpr, RANK: gl.constexpr, RANKS: gl.constexpr, PARTS: gl.constexpr,
    END_0: gl.constexpr, END_1: gl.constexpr, GATED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Wait until A · x is complete, and return it for the rows of `load_up`: tensors [1, USERS, 16] float32.

    Rows from END_0 on use the second A, those from END_1 on the third.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2], [4, 1, 8], [WARPS, 1, 1] if USERS == 1 else [1, WARPS, 1], [2, 1, 0]
    )
    m = gl.arange(0, USERS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    has_adapter = gl.load(slots + m, mask=m < num_tokens, other=-1) >= 0
    group = (first >= END_0).to(gl.int32) + (first >= END_1).to(gl.int32)
    up_group = (first + N >= END_0).to(gl.int32) + (first + N >= END_1).to(gl.int32)
    columns = inner + m * PARTS * RANKS + r
    _wait_for(arrivals, num_shrink)
    us = ()
    for at in gl.static_range(0, RANK, ROWS):
        us = us + (_sum_of_parts(columns + group * RANK + at, has_adapter, USERS, RANKS, PARTS, LAYOUT),)
        if GATED:
            us = us + (_sum_of_parts(columns + up_group * RANK + at, has_adapter, USERS, RANKS, PARTS, LAYOUT),)
    return us


@gluon.jit
def _sum_of_parts(
    columns, has_adapter, USERS: gl.constexpr, RANKS: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr
):
    u = gl.zeros([1, USERS, ROWS], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        u += gl.load(columns + part * RANKS, mask=has_adapter, other=0.0, cache_modifier=".cg")
    return u


@gluon.jit
def expand(bs, us, RANK: gl.constexpr, GATED: gl.constexpr, TOKENS_FIRST: gl.constexpr, SUM: gl.constexpr):
    """Return B · (A · x) of what `load_up` and `load_inner` returned, for both halves of the rows: each
    [BLOCK_N, USERS] float32, transposed with TOKENS_FIRST.
    """
    total = bs[0].to(gl.float32) * us[0]
    up_total = total
    if GATED:
        up_total = bs[1].to(gl.float32) * us[1]
    for _ in gl.static_range(ROWS, RANK, ROWS):
        bs = bs[2:] if GATED else bs[1:]
        us = us[2:] if GATED else us[1:]
        total += bs[0].to(gl.float32) * us[0]
        if GATED:
            up_total += bs[1].to(gl.float32) * us[1]
    change = _as_sums(total, TOKENS_FIRST, SUM)
    return change, _as_sums(up_total, TOKENS_FIRST, SUM) if GATED else change


@gluon.jit
def _as_sums(products, TOKENS_FIRST: gl.constexpr, SUM: gl.constexpr):
    total = gl.sum(products, 2)
    if TOKENS_FIRST:
        total = gl.permute(total, (1, 0))
    return gl.convert_layout(total, gl.SliceLayout(0, SUM))


CONSTANTS = ("ADAPTED", "USERS", "RANK", "RANKS", "PARTS", "CHANNELS", "END_0", "END_1")
NO_ADAPTERS: tuple[int, tuple[Any, ...], dict[str, Any]] = 0, (None,) * 11, dict.fromkeys(CONSTANTS, 0)


def supports(weights: LoraWeights, block_n: int, gated: bool) -> bool:
    """Return whether a program's rows, `block_n` of them, have one A, and that it is small."""
    numbers = [group.number for group in weights.groups]
    starts = [group.start for group in weights.groups]
    return (
        weights.rank <= MAX_RANK
        and weights.rank % ROWS.value == 0
        and numbers == list(range(len(numbers)))
        and len(numbers) <= MAX_GROUPS
        and all(each % block_n == 0 for each in (*starts, weights.factor.shape[1] // (2 if gated else 1)))
        and weights.down.stride(1) == weights.down.shape[2]
    )


def arguments(x: Tensor, adapters: Adapters, tile: int) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """Return the number of programs that compute A · x, and the launch's arguments and constants of adapters.

    tile: tokens of the GEMM's tile.
    """
    weights, tokens = adapters
    ranks, channels = weights.down.shape[1:]
    own = BLOCK_K.value * (3 if len(x) <= FEW_TOKENS else 4)
    parts = cdiv(channels, own)
    inner = torch.empty(len(x), parts, ranks, dtype=torch.float32, device=x.device)
    ends = [*(group.start for group in weights.groups[1:]), NEVER.value, NEVER.value]
    num_shrink = len(x) * (ranks // ROWS.value) * parts
    given = (
        tokens.slots, weights.down, weights.up, weights.factor, weights.shift, inner, tokens.counters(),
        weights.down.stride(0), weights.up.stride(0), weights.factor.stride(0), num_shrink,
    )  # fmt: skip
    constants = True, 1 if len(x) == 1 else tile, weights.rank, ranks, parts, own, ends[0], ends[1]
    return num_shrink, given, dict(zip(CONSTANTS, constants, strict=True))
