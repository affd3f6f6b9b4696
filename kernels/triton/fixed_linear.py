"""GEMM of float weights with one order of sums, in Triton: the same tile whatever the number of tokens.

An output is the sum over BLOCK_K channels after the other, all of them in one program, without split-K. So it depends
on its token and its row of the weight alone.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import cdiv, launch_dependents, pdl_options, wait_for_inputs


@triton.jit(do_not_specialize=["num_tokens"])
def _fixed_linear_kernel(
    x, weight, bias, residual, out, num_tokens, zero, stride_x, stride_out,
    N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and weight [N, K], plus `residual`, which has the strides of `out`; rounded once.

    PIECES: 1, 2, 4 or 8 parts of the channels, whose sums a tree adds up: see `kernels.reference.split_sums`.
    zero: see `kernels.triton.fixed_parts`.
    """
    WIDTH: tl.constexpr = K // PIECES
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tokens = tl.minimum(m, num_tokens - 1).to(tl.int64)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    if PDL:
        launch_dependents()
        wait_for_inputs()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    one, two, four = acc, acc, acc  # sums of one piece, of two and of four that wait for their neighbours
    for piece in tl.static_range(PIECES):
        acc = tl.full([BLOCK_M, BLOCK_N], zero, tl.float32)
        for at in range(piece * WIDTH, (piece + 1) * WIDTH, BLOCK_K):
            inside = at + k < (piece + 1) * WIDTH
            xk = tl.load(x + tokens[:, None] * stride_x + (at + k)[None, :], mask=inside[None, :], other=0.0)
            wk = tl.load(weight + rows[None, :] * K + (at + k)[:, None], mask=inside[:, None], other=0.0)
            acc = tl.dot(xk, wk, acc, input_precision="ieee")
        if BIAS and piece == 0:
            acc += tl.load(bias + rows).to(tl.float32)[None, :]
        if piece % 2 == 0:
            one = acc
        else:
            acc = one + acc
            if piece % 4 == 1:
                two = acc
            else:
                acc = two + acc
                if piece % 8 == 3:
                    four = acc
                else:
                    acc = four + acc
    mask = (m < num_tokens)[:, None] & (n < N)[None, :]
    at_out = tokens[:, None] * stride_out + n[None, :]
    if RESIDUAL:
        acc += tl.load(residual + at_out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at_out, acc.to(out.dtype.element_ty), mask=mask)


def fixed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, residual: Tensor | None = None, pieces: int = 1
) -> Tensor:
    """Compute x [M, K] weightᵀ [K, N] + bias, plus `residual` [M, N], into `out` [M, N]; rows must be contiguous.

    pieces: of equal numbers of channels, whose sums a tree adds up.
    """
    assert x.shape[1] % pieces == 0
    (num_tokens, k), n = x.shape, len(weight)
    assert x.stride(1) == out.stride(1) == 1
    assert weight.is_contiguous()
    assert residual is None or residual.stride() == out.stride()
    if num_tokens:
        block_m, block_n, block_k = (32, 32, 32) if x.dtype == torch.float32 else (64, 64, 64)
        _fixed_linear_kernel[(cdiv(n, block_n), cdiv(num_tokens, block_m))](
            x, weight, x if bias is None else bias, x if residual is None else residual, out, num_tokens, 0.0,
            x.stride(0), out.stride(0), N=n, K=k, BIAS=bias is not None, RESIDUAL=residual is not None, PIECES=pieces,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=3, **pdl_options(x.device),
        )  # fmt: skip
    return out


@triton.jit
def _log_sum_kernel(logits, out, stride, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """log Σ exp of a row of logits [V], BLOCK of them after the other."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        launch_dependents()
        wait_for_inputs()
    v = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    for at in range(0, V, BLOCK):
        values = tl.load(logits + row * stride + at + v, mask=at + v < V, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, values)
    largest = tl.max(top, 0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, V, BLOCK):
        values = tl.load(logits + row * stride + at + v, mask=at + v < V, other=-float("inf")).to(tl.float32)
        total += tl.exp(values - base)
    tl.store(out + row, base + tl.log(tl.sum(total, 0)))


def log_sums(logits: Tensor) -> Tensor:
    """Return log Σ exp of each row of logits [B, V]: [B] float32. Rows must be contiguous."""
    assert logits.stride(1) == 1
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _log_sum_kernel[(len(logits),)](
            logits, out, logits.stride(0), V=logits.shape[1], BLOCK=2048, num_warps=8, **pdl_options(logits.device)
        )
    return out
