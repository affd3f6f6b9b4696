"""GEMM of float weights whose pieces of channels a fixed tree adds up, in Triton: as fast as the size of a step allows.

The order of sums is that of `kernels.triton.fixed_linear` with as many pieces. What may change with the size is who
computes: one program all pieces of a tile, or several programs some of them each, whose float32 sums the last one to
arrive adds up by the same tree; and how large a tile is: a tensor core's sums do not depend on it. `kernels.gluon`'s
GEMM of many tokens has the same sums.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.activation import Gate
from kernels.data.capability import shared_memory
from kernels.gpu.device import num_multiprocessors
from kernels.gpu.launch import cdiv, launch_dependents, pdl_options, prefetch_lines, wait_for_inputs
from kernels.triton.activation import activate

LARGE_STEP = 512  # tokens from which tiles are large
PROGRAMS = 4  # of a multiprocessor, up to which tiles are divided among programs
MANY_OUTPUTS = 16384  # so many give enough of the ordinary tiles


@triton.jit
def _push(total, one, two, four, i: tl.constexpr):
    """Add the sum of piece i to the tree. Returns the sum of what is whole now, and of 1, 2 and 4 pieces that wait."""
    if i % 2 == 0:
        one = total
    else:
        total = one + total
        if i % 4 == 1:
            two = total
        else:
            total = two + total
            if i % 8 == 3:
                four = total
            else:
                total = four + total
    return total, one, two, four


@triton.jit
def _load(x, weight, inside, is_token, EVEN: tl.constexpr):
    """A tile of tokens, and one of the weight; with EVEN all channels are inside."""
    if EVEN:
        return tl.load(x, mask=is_token, other=0.0), tl.load(weight)
    return tl.load(x, mask=is_token & inside[None, :], other=0.0), tl.load(weight, mask=inside[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _fixed_parts_kernel(
    x, weight, bias, residual, out, partial, arrivals, num_tokens, zero, stride_x, stride_out,
    N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ROUND: tl.constexpr,
    GATE: tl.constexpr, PIECES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and weight [N, K], plus `residual`, which has the strides of `out`; rounded once, with
    ROUND before the residual is added, too.

    With GATE the weight has 2N rows, gate rows, then up rows, whose sums are rounded before the activation and after
    it. SPLITS: programs that share a tile. partial [SPLITS, M, N] float32; arrivals: 0 before and after, one for each
    tile. PREFETCH: of weights so many channels at a time, before the kernel ahead has ended; 0: none.
    zero: 0.0, unknown to the compiler. It makes a product that is added to a sum, where it begins with a constant 0 and
    its loop has one round, a product that continues the sum: another order, and only where SPLITS is 1.
    """
    WIDTH: tl.constexpr = K // PIECES
    OWN: tl.constexpr = PIECES // SPLITS
    EVEN: tl.constexpr = WIDTH % BLOCK_K == 0
    LINE: tl.constexpr = 64  # channels of 16 bits in a line of the cache
    split = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_token = (m < num_tokens)[:, None]
    tokens = m.to(tl.int64)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    if PDL:
        launch_dependents()
        if PREFETCH > 0:
            lines = tl.arange(0, PREFETCH // LINE) * LINE
            for at in range(split * OWN * WIDTH, (split + 1) * OWN * WIDTH, PREFETCH):
                inside = weight + rows[:, None] * K + (at + lines)[None, :]
                prefetch_lines(inside)
                if GATE != "":
                    prefetch_lines(inside + N * K)
        wait_for_inputs()
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    one, two, four = total, total, total
    high = tl.full([BLOCK_M, BLOCK_N], zero, tl.float32)
    for piece in tl.static_range(OWN):
        begin = (split * OWN + piece) * WIDTH
        from_x = x + tokens[:, None] * stride_x + (begin + k)[None, :]
        from_weight = weight + rows[None, :] * K + (begin + k)[:, None]
        acc = tl.full([BLOCK_M, BLOCK_N], zero, tl.float32)
        for at in range(0, WIDTH, BLOCK_K):
            xk, wk = _load(from_x + at, from_weight + at, at + k < WIDTH, is_token, EVEN)
            acc = tl.dot(xk, wk, acc, input_precision="ieee")
            if GATE != "":
                if EVEN:
                    up = tl.load(from_weight + N * K + at)
                else:
                    up = tl.load(from_weight + N * K + at, mask=(at + k < WIDTH)[:, None], other=0.0)
                high = tl.dot(xk, up, high, input_precision="ieee")
        if BIAS and piece == 0:
            acc = tl.where(split == 0, acc + tl.load(bias + rows).to(tl.float32)[None, :], acc)
        total, one, two, four = _push(acc, one, two, four, piece)
    if GATE != "":
        if BIAS:
            high += tl.load(bias + N + rows).to(tl.float32)[None, :]
        active = activate(total.to(out.dtype.element_ty).to(tl.float32), GATE).to(out.dtype.element_ty)
        total = active.to(tl.float32) * high.to(out.dtype.element_ty).to(tl.float32)
    mask = is_token & (n < N)[None, :]
    at_out = tokens[:, None] * stride_out + n[None, :]
    if SPLITS == 1:
        _store(total, residual + at_out, out + at_out, mask, RESIDUAL, ROUND)
    else:
        part = partial + tokens[:, None] * N + n[None, :]
        stride = num_tokens.to(tl.int64) * N
        tl.store(part + split * stride, total, mask=mask)
        tl.debug_barrier()  # all of this program's sums are stored before it arrives
        counter = arrivals + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.debug_barrier()
            for each in tl.static_range(SPLITS):
                found = tl.load(part + each * stride, mask=mask, other=0.0, cache_modifier=".cg")
                total, one, two, four = _push(found, one, two, four, each)
            _store(total, residual + at_out, out + at_out, mask, RESIDUAL, ROUND)
            tl.store(counter, 0)


@triton.jit
def _store(total, residual, out, mask, RESIDUAL: tl.constexpr, ROUND: tl.constexpr):
    """Store sums, plus the residual, at pointers."""
    if ROUND:
        total = total.to(out.dtype.element_ty).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, total.to(out.dtype.element_ty), mask=mask)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Counters of the tiles that programs share. Kernels of a device run one after the other, and leave them 0."""
    return torch.zeros(PROGRAMS * num_multiprocessors(device), dtype=torch.int32, device=device)


class Tile(NamedTuple):
    """Tokens, outputs and channels of a tile; see `_fixed_parts_kernel`."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    prefetches: bool = False


def fixed_parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
    pieces: int = 1,
    *,
    rounds: bool = False,
    gate: Gate | Literal[""] = "",
    tile: Tile | None = None,
) -> Tensor:
    """Compute x [M, K] weightᵀ [K, N] + bias, plus `residual` [M, N], into `out` [M, N]; rows must be contiguous.

    pieces: 1, 2, 4 or 8, of equal numbers of channels, whose sums a tree adds up. rounds: the sums, before the residual
    is added. gate: `out` is the gated activation [M, N / 2].
    """
    assert x.shape[1] % pieces == 0
    (num_tokens, k), n = x.shape, out.shape[1]
    assert x.stride(1) == out.stride(1) == 1
    assert weight.is_contiguous()
    assert len(weight) == (2 * n if gate else n)
    assert residual is None or residual.stride() == out.stride()
    assert not gate or (pieces == 1 and residual is None)
    if not num_tokens:
        return out
    tile = tile or _tile(x, n)
    grid, splits = (cdiv(n, tile.block_n), cdiv(num_tokens, tile.block_m)), 1
    most = PROGRAMS * num_multiprocessors(x.device)
    while splits < pieces and 2 * splits * grid[0] * grid[1] <= most:
        splits *= 2
    shared, own = splits > 1, k // splits
    ahead = min(own & -own, 512) if tile.prefetches else 0
    partial = torch.empty(splits, num_tokens, n, dtype=torch.float32, device=x.device) if shared else x
    _fixed_parts_kernel[(*grid, splits)](
        x, weight, x if bias is None else bias, x if residual is None else residual, out, partial,
        _counters(x.device) if shared else x, num_tokens, 0.0, x.stride(0),
        out.stride(0), N=n, K=k, BIAS=bias is not None, RESIDUAL=residual is not None, ROUND=rounds, GATE=gate,
        PIECES=pieces, SPLITS=splits, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, PREFETCH=ahead,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(x.device),
    )  # fmt: skip
    return out


def _tile(x: Tensor, n: int) -> Tile:
    if x.itemsize == 4:
        return Tile(32, 32, 32, 4, 3)
    if len(x) >= LARGE_STEP and n >= 1024:
        return Tile(128, 128, 64, 8, 3)
    return Tile(64, 64, 64, 4, 4)


def few_tile(x: Tensor, n: int, pieces: int, is_small: bool) -> Tile | None:
    """Return a tile for a step of few tokens, which is bound by reading the weight; None: that of `fixed_parts`.

    is_small: the weight is, so that a program may prefetch its part.
    """
    if x.itemsize == 4:
        return None
    width, room = x.shape[1] // pieces, shared_memory(x.device) >= 160 << 10
    if is_small:
        return Tile(64, 32, 128 if width % 128 == 0 else 64, 4, 4 if room else 2, width % 64 == 0)
    return Tile(64, 32, 64, 4, 6 if room else 4) if pieces == 1 and n < MANY_OUTPUTS else None
