"""Matrix products fused with the norm, activation or residual sum around them, in Triton for few tokens, else in
cuBLAS.

With few tokens a linear layer is bound by reading its weight, and a decode step by the number of kernels. So one kernel
does the product, the RMSNorm before it, and the activation or the residual sum after it:
`kernels.gluon.linear.small_batch` where it applies, else, up to `MAX_SMALL` tokens, the one here. A token's norm factor
1/rms is the same for all its channels, so it is applied to the sums, and one pass over x suffices. With programmatic
dependent launch a kernel starts while the one before it still runs, and first loads weights, which no earlier kernel
writes: its first chunk into registers, the rest into L2.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, prefetch, wait_for_inputs
from kernels.reference import Gate
from kernels.triton import quantized, scaled
from kernels.triton.activation import activate, gate_and_mul
from kernels.triton.norm import add_rms_norm, rms_norm

if triton.__version__.startswith(("3.6.", "3.7.")):  # Gluon's interface is not stable: the versions it was checked on
    from kernels.gluon.linear import small_batch as few
else:
    few = None  # type: ignore[assignment]

MAX_APART = 512  # tokens up to which a norm's kernel adds the product to the residual stream faster than cuBLAS does
MAX_SMALL = 2  # tokens up to which the product on the CUDA cores beats cuBLAS


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
        acc = activate(acc, GATE == "gelu_tanh") * up
    mask = (m < num_tokens)[None, :] & (n < N)[:, None]
    if RESIDUAL:
        acc += tl.load(residual + m[None, :] * stride_out + n[:, None], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m[None, :] * stride_out + n[:, None], acc.to(out.dtype.element_ty), mask=mask)


def _small(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gate: Gate | Literal[""] = "",
    residual: Tensor | None = None,
    block_n: int = 0,
    block_k: int = 0,
    num_warps: int = 0,
) -> None:
    """x [M, K] -> out [M, N], M <= MAX_SMALL, plus `residual`, which lies in memory as out does."""
    num_tokens, k = x.shape
    n = out.shape[1]
    choice = _small_config(n, k, gate != "")
    block_n, block_k = block_n or choice[0], block_k or choice[1]
    _small_linear_kernel[(cdiv(n, block_n),)](
        x, weight, weight if bias is None else bias, weight if norm_weight is None else norm_weight,
        out if residual is None else residual, out, eps, num_tokens, x.stride(0), out.stride(0), N=n, K=k,
        M=next_power_of_2(num_tokens), BLOCK_N=block_n, BLOCK_K=block_k, NORM=norm_weight is not None, GATE=gate,
        BIAS=bias is not None, RESIDUAL=residual is not None, BYTES=x.element_size(), num_warps=num_warps or choice[2],
        **pdl_options(x.device),
    )  # fmt: skip


def _small_config(n: int, k: int, gated: bool) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_K, warps): 64 weights for each thread in flight, in as many programs as there are."""
    block_k = min(k & -k, 4096) if k & -k >= 512 else min(next_power_of_2(k), 1024)
    num_warps = 2 if block_k <= 1024 else 4
    block_n = max(num_warps * 32 * 64 // block_k // (2 if gated else 1), 1)
    return block_n, block_k, num_warps


def _fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gate: Gate | Literal[""] = "",
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """x [M, K] -> [M, N] in one kernel, written to `residual` or `out` where that is given; None where cuBLAS does
    better.
    """
    num_tokens = x.shape[0]
    n = len(weight) // 2 if gate else len(weight)
    config = few.config(x, n, gate != "") if few is not None else None
    if config is None and num_tokens > MAX_SMALL:
        return None
    if out is None:
        out = x.new_empty(num_tokens, n) if residual is None else residual
    assert x.stride(1) == out.stride(1) == 1
    assert weight.is_contiguous()
    if config is None:
        _small(x, weight, bias, out, norm_weight=norm_weight, eps=eps, gate=gate, residual=residual)
    else:
        few.launch(x, weight, bias, out, config, norm_weight=norm_weight, eps=eps, gate=gate, residual=residual)
    return out


def linear(x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear`."""
    if isinstance(weight, QuantizedWeight):
        return quantized.linear(x, weight, bias)
    assert isinstance(x, Tensor)
    out = _fused(x, weight, bias)
    return F.linear(x, weight, bias) if out is None else out


def linear_add(residual: Tensor, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear_add`."""
    if isinstance(weight, QuantizedWeight):
        return quantized.linear_add(residual, x, weight, bias)
    assert isinstance(x, Tensor)
    if _fused(x, weight, bias, residual=residual) is not None:
        return residual
    residual = residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


def linear_add_norm(
    residual: Tensor, x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None, norm: NextNorm
) -> Tensor | QuantizedRows:
    """See `kernels.reference.linear_add_norm`."""
    if isinstance(weight, QuantizedWeight):
        return quantized.linear_add_norm(residual, x, weight, bias, norm)
    assert isinstance(x, Tensor)
    if norm.rounded is None and len(x) <= MAX_APART and norms_apart(x, weight):
        return add_rms_norm(residual, F.linear(x, weight, bias), norm.weight, norm.eps)
    return scaled.finish_norm(linear_add(residual, x, weight, bias), norm)


def linear_gated(x: Tensor | QuantizedRows, weight: Weight, bias: Tensor | None = None, gate: Gate = "silu") -> Tensor:
    """See `kernels.reference.linear_gated`."""
    if isinstance(weight, QuantizedWeight):
        return quantized.linear_gated(x, weight, bias, gate)
    assert isinstance(x, Tensor)
    out = _fused(x, weight, bias, gate=gate)
    return gate_and_mul(F.linear(x, weight, bias), gate) if out is None else out


def quantized_input(
    x: Tensor, weight: Weight, bias: Tensor | None = None, gate: Gate | None = None
) -> QuantizedRows | None:
    """See `kernels.reference.quantized_input`."""
    return quantized.quantized_input(x, weight, bias, gate) if isinstance(weight, QuantizedWeight) else None


def norms_apart(x: Tensor, weight: Weight, gate: Gate | None = None) -> bool:
    """See `kernels.reference.norms_apart`."""
    if isinstance(weight, QuantizedWeight):
        return quantized.norms_apart(x, weight, gate)
    n = len(weight) if gate is None else len(weight) // 2
    return len(x) > MAX_SMALL and (few is None or few.config(x, n, gate is not None) is None)


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.norm_linear`."""
    if isinstance(weight, QuantizedWeight):
        return quantized.norm_linear(x, norm_weight, eps, weight, bias, out)
    fused = _fused(x, weight, bias, norm_weight=norm_weight, eps=eps, out=out)
    if fused is not None:
        return fused
    normed = rms_norm(x, norm_weight, eps)
    if out is None:
        return F.linear(normed, weight, bias)
    return torch.mm(normed, weight.t(), out=out) if bias is None else torch.addmm(bias, normed, weight.t(), out=out)


def norm_gated(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Weight, bias: Tensor | None = None, gate: Gate = "silu"
) -> Tensor:
    """See `kernels.reference.norm_gated`."""
    if isinstance(weight, QuantizedWeight):
        return quantized.norm_gated(x, norm_weight, eps, weight, bias, gate)
    out = _fused(x, weight, bias, norm_weight=norm_weight, eps=eps, gate=gate)
    return gate_and_mul(F.linear(rms_norm(x, norm_weight, eps), weight, bias), gate) if out is None else out
