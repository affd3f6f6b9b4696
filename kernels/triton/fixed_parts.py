"""GEMM of float weights whose pieces of channels a fixed tree adds up, in Triton: as fast as the size of a step allows.

The order of sums is that of `kernels.triton.fixed_linear` with as many pieces. What may change with the size is who
computes: one program all pieces of a tile, or several programs some of them each, whose float32 sums the last one to
arrive adds up by the same tree; and how large a tile is. A tile of tensor cores has at least 64 tokens in each.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.device import num_multiprocessors
from kernels.gpu.launch import cdiv, launch_dependents, pdl_options, wait_for_inputs

LARGE_STEP = 512  # tokens from which tiles are large
PROGRAMS = 4  # of a multiprocessor, up to which tiles are divided among programs


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


@triton.jit(do_not_specialize=["num_tokens"])
def _fixed_parts_kernel(
    x, weight, bias, residual, out, partial, arrivals, num_tokens, zero, stride_x, stride_out,
    N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PIECES: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and weight [N, K], plus `residual`, which has the strides of `out`; rounded once.

    SPLITS: programs that share a tile. partial [SPLITS, M, N] float32; arrivals: 0 before and after, one for each tile.
    zero: 0.0, unknown to the compiler. It makes a product that is added to a sum, where it begins with a constant 0 and
    its loop has one round, a product that continues the sum: another order, and only where SPLITS is 1.
    """
    WIDTH: tl.constexpr = K // PIECES
    OWN: tl.constexpr = PIECES // SPLITS
    split = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_token = (m < num_tokens)[:, None]
    tokens = m.to(tl.int64)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    if PDL:
        launch_dependents()
        wait_for_inputs()
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    one, two, four = total, total, total
    for piece in tl.static_range(OWN):
        begin = (split * OWN + piece) * WIDTH
        from_x = x + tokens[:, None] * stride_x + (begin + k)[None, :]
        from_weight = weight + rows[None, :] * K + (begin + k)[:, None]
        acc = tl.full([BLOCK_M, BLOCK_N], zero, tl.float32)
        for at in range(0, WIDTH, BLOCK_K):
            if WIDTH % BLOCK_K == 0:
                xk = tl.load(from_x + at, mask=is_token, other=0.0)
                wk = tl.load(from_weight + at)
            else:
                inside = at + k < WIDTH
                xk = tl.load(from_x + at, mask=is_token & inside[None, :], other=0.0)
                wk = tl.load(from_weight + at, mask=inside[:, None], other=0.0)
            acc = tl.dot(xk, wk, acc, input_precision="ieee")
        if BIAS and piece == 0:
            acc = tl.where(split == 0, acc + tl.load(bias + rows).to(tl.float32)[None, :], acc)
        total, one, two, four = _push(acc, one, two, four, piece)
    mask = is_token & (n < N)[None, :]
    at_out = tokens[:, None] * stride_out + n[None, :]
    if SPLITS == 1:
        if RESIDUAL:
            total += tl.load(residual + at_out, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at_out, total.to(out.dtype.element_ty), mask=mask)
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
            if RESIDUAL:
                total += tl.load(residual + at_out, mask=mask, other=0.0).to(tl.float32)
            tl.store(out + at_out, total.to(out.dtype.element_ty), mask=mask)
            tl.store(counter, 0)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Counters of the tiles that programs share. Kernels of a device run one after the other, and leave them 0."""
    return torch.zeros(PROGRAMS * num_multiprocessors(device), dtype=torch.int32, device=device)


def fixed_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, residual: Tensor | None = None, pieces: int = 1
) -> Tensor:
    """Compute x [M, K] weightᵀ [K, N] + bias, plus `residual` [M, N], into `out` [M, N]; rows must be contiguous.

    pieces: 1, 2, 4 or 8, of equal numbers of channels, whose sums a tree adds up.
    """
    assert x.shape[1] % pieces == 0
    (num_tokens, k), n = x.shape, len(weight)
    assert x.stride(1) == out.stride(1) == 1
    assert weight.is_contiguous()
    assert residual is None or residual.stride() == out.stride()
    if not num_tokens:
        return out
    block_m, block_n, block_k, num_warps, num_stages = _tile(x, n)
    grid, splits = (cdiv(n, block_n), cdiv(num_tokens, block_m)), 1
    most = PROGRAMS * num_multiprocessors(x.device)
    while splits < pieces and 2 * splits * grid[0] * grid[1] <= most:
        splits *= 2
    shared = splits > 1
    partial = torch.empty(splits, num_tokens, n, dtype=torch.float32, device=x.device) if shared else x
    _fixed_parts_kernel[(*grid, splits)](
        x, weight, x if bias is None else bias, x if residual is None else residual, out, partial,
        _counters(x.device) if shared else x, num_tokens, 0.0, x.stride(0), out.stride(0), N=n, K=k,
        BIAS=bias is not None, RESIDUAL=residual is not None, PIECES=pieces, SPLITS=splits, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps, num_stages=num_stages, **pdl_options(x.device),
    )  # fmt: skip
    return out


def _tile(x: Tensor, n: int) -> tuple[int, int, int, int, int]:
    """Return tokens, outputs and channels of a tile, warps and stages."""
    if x.itemsize == 4:
        return 32, 32, 32, 4, 3
    if len(x) >= LARGE_STEP and n >= 1024:
        return 128, 128, 64, 8, 3
    return 64, 64, 64, 4, 4
