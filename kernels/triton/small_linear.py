"""GEMM of one or two tokens and a float weight on CUDA cores, in Triton, with a fused prologue and epilogue.

A linear layer of so few tokens is bound by reading its weight, and a decode step by its number of kernels. So one
kernel computes the GEMM, the RMSNorm before it, and the activation or the residual sum after it. A token's norm
factor 1/rms is the same for all its channels, so it is applied to the accumulators, and one pass over x suffices. With
programmatic dependent launch a kernel starts while the one before it still runs, and first loads weights, which no
earlier kernel writes: its first chunk into registers, the rest into L2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.data.fusion import Fusion
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, prefetch, wait_for_inputs
from kernels.triton.activation import activate


@triton.jit
def _load_rows(weight, n, at, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows n of weight [*, K], channels [at, at + BLOCK_K); rows from N on are not read."""
    k = at + tl.arange(0, BLOCK_K)
    pointers = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    if K % BLOCK_K == 0 and N % BLOCK_N == 0:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["num_tokens"])
def _small_linear_kernel(
    x, weight, bias, norm_weight, residual, out, eps, num_tokens, stride_x, stride_out,
    N: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BYTES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and weight [N, K], or [2N, K] with GATE ("silu" or "gelu_tanh"): gate rows, then up
    rows.
    """
    GATED: tl.constexpr = GATE != ""
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, M)
    up_weight = weight + N * K
    if PDL:
        if K > BLOCK_K and N % BLOCK_N == 0:
            prefetch(weight + first.to(tl.int64) * K, BLOCK_N * K * BYTES)
            if GATED:
                prefetch(up_weight + first.to(tl.int64) * K, BLOCK_N * K * BYTES)
        launch_dependents()
    w = _load_rows(weight, n, 0, N, K, BLOCK_N, BLOCK_K)
    w_up = _load_rows(up_weight, n, 0, N, K, BLOCK_N, BLOCK_K) if GATED else w
    if PDL:
        wait_for_inputs()
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    up = tl.zeros([BLOCK_N, M], tl.float32)
    squares = tl.zeros([M], tl.float32)
    for at in tl.static_range(0, K, BLOCK_K):
        if at > 0:
            w = _load_rows(weight, n, at, N, K, BLOCK_N, BLOCK_K)
            w_up = _load_rows(up_weight, n, at, N, K, BLOCK_N, BLOCK_K) if GATED else w
        k = at + tl.arange(0, BLOCK_K)
        wide = w.to(tl.float32)
        wide_up = w_up.to(tl.float32)
        if NORM:
            g = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
        for i in tl.static_range(M):
            xi = tl.load(x + i * stride_x + k, mask=(k < K) & (i < num_tokens), other=0.0).to(tl.float32)
            if NORM:
                squares += tl.where(m == i, tl.sum(xi * xi, 0), 0.0)
                xi *= g
            acc += tl.where((m == i)[None, :], tl.sum(wide * xi[None, :], 1)[:, None], 0.0)
            if GATED:
                up += tl.where((m == i)[None, :], tl.sum(wide_up * xi[None, :], 1)[:, None], 0.0)
    if NORM:
        scale = tl.rsqrt(squares / K + eps)[None, :]
        acc *= scale
        up *= scale
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = activate(acc, GATE) * up
    mask = (m < num_tokens)[None, :] & (n < N)[:, None]
    if RESIDUAL:
        acc += tl.load(residual + m[None, :] * stride_out + n[:, None], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m[None, :] * stride_out + n[:, None], acc.to(out.dtype.element_ty), mask=mask)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    fusion: Fusion,
) -> None:
    """Compute x [M, K] -> out [M, N], plus `residual`, of the strides of `out`. M is padded to a power of two."""
    norm_weight, eps, gate, residual, _ = fusion
    num_tokens, k = x.shape
    n = out.shape[1]
    block_n, block_k, num_warps = _config(n, k, gate is not None)
    _small_linear_kernel[(cdiv(n, block_n),)](
        x, weight, weight if bias is None else bias, weight if norm_weight is None else norm_weight,
        out if residual is None else residual, out, eps, num_tokens, x.stride(0), out.stride(0), N=n, K=k,
        M=next_power_of_2(num_tokens), BLOCK_N=block_n, BLOCK_K=block_k, NORM=norm_weight is not None, GATE=gate or "",
        BIAS=bias is not None, RESIDUAL=residual is not None, BYTES=x.element_size(), num_warps=num_warps,
        **pdl_options(x.device),
    )  # fmt: skip


def _config(n: int, k: int, gated: bool) -> tuple[int, int, int]:
    """Return (BLOCK_N, BLOCK_K, warps): each thread has 64 weights in flight, in as many programs as there are."""
    block_k = min(k & -k, 4096) if k & -k >= 512 else min(next_power_of_2(k), 1024)
    num_warps = 2 if block_k <= 1024 else 4
    block_n = max(num_warps * 32 * 64 // block_k // (2 if gated else 1), 1)
    return block_n, block_k, num_warps
