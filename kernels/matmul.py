"""Matrix products with what stands around them in a decoder layer, in Triton for few tokens and in cuBLAS for many.

With few tokens a linear layer is bound by reading its weight, and a decode step by the number of kernels. So up to
`MAX_SMALL` tokens one kernel does the product, the RMSNorm before it, and the SwiGLU or the residual sum after it. The norm's
factor 1/rms of a token is the same for all its channels, so it is applied to the sums, and one pass over x suffices.
With programmatic dependent launch a kernel starts while the one before it still runs, and first asks for its weights,
which depend on nothing, to be brought into L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.activation import silu_and_mul
from kernels.launch import launch_dependents, pdl_options, prefetch, wait_for_inputs
from kernels.norm import rms_norm

MAX_SMALL = 16  # tokens up to which the product is bound by reading the weight


@triton.jit(do_not_specialize=["num_tokens"])
def _small_linear_kernel(
    x, weight, bias, norm_weight, residual, out, eps, num_tokens, stride_x, stride_out,
    N: tl.constexpr, K: tl.constexpr, M_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and weight [N, K], or [2N, K] with SWIGLU: gate rows, then up rows."""
    first = tl.program_id(0) * BLOCK_N
    if PDL:
        if N % BLOCK_N == 0:
            prefetch(weight + first.to(tl.int64) * K, BLOCK_N * K * BYTES)
            if SWIGLU:
                prefetch(weight + (first + N).to(tl.int64) * K, BLOCK_N * K * BYTES)
        launch_dependents()
        wait_for_inputs()
    n = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, M_PAD)
    k = tl.arange(0, BLOCK_K)
    n_mask = n < N
    m_mask = m < num_tokens
    weight_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + m[:, None] * stride_x + k[None, :]
    acc = tl.zeros([BLOCK_N, M_PAD], tl.float32)
    up = tl.zeros([BLOCK_N, M_PAD], tl.float32)
    squares = tl.zeros([M_PAD], tl.float32)
    for at in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k_mask = at + k < K
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:
            w = tl.load(weight_at + at)
        else:
            w = tl.load(weight_at + at, mask=n_mask[:, None] & k_mask[None, :], other=0.0)
        xk = tl.load(x_at + at, mask=m_mask[:, None] & k_mask[None, :], other=0.0)
        if NORM:
            wide = xk.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            xk = (wide * tl.load(norm_weight + at + k, mask=k_mask, other=0.0).to(tl.float32)[None, :]).to(xk.dtype)
        acc = tl.dot(w, tl.trans(xk), acc, input_precision=PRECISION)
        if SWIGLU:
            if K % BLOCK_K == 0 and N % BLOCK_N == 0:
                w = tl.load(weight_at + N * K + at)
            else:
                w = tl.load(weight_at + N * K + at, mask=n_mask[:, None] & k_mask[None, :], other=0.0)
            up = tl.dot(w, tl.trans(xk), up, input_precision=PRECISION)
    if NORM:
        scale = tl.rsqrt(squares / K + eps)[None, :]
        acc *= scale
        up *= scale
    if BIAS:
        acc += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
        if SWIGLU:
            up += tl.load(bias + N + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    if SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    mask = m_mask[None, :] & n_mask[:, None]
    if RESIDUAL:
        acc += tl.load(residual + m[None, :] * stride_out + n[:, None], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m[None, :] * stride_out + n[:, None], acc.to(out.dtype.element_ty), mask=mask)


def _small(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual: Tensor | None = None,
    block_n: int = 0,
    block_k: int = 0,
    num_stages: int = 0,
    num_warps: int = 0,
) -> Tensor:
    """x [M, K] -> [M, N], M <= MAX_SMALL; written into `residual` in place where that is given."""
    num_tokens, k = x.shape
    n = len(weight) // 2 if swiglu else len(weight)
    out = x.new_empty(num_tokens, n) if residual is None else residual
    choice = _small_config(n, k, x.dtype)
    block_n, block_k = block_n or choice[0], block_k or choice[1]
    _small_linear_kernel[(triton.cdiv(n, block_n),)](
        x, weight, weight if bias is None else bias, weight if norm_weight is None else norm_weight, out, out, eps, num_tokens,
        x.stride(0), out.stride(0), N=n, K=k, M_PAD=16, BLOCK_N=block_n, BLOCK_K=block_k,
        NORM=norm_weight is not None, SWIGLU=swiglu, BIAS=bias is not None, RESIDUAL=residual is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", STAGES=num_stages or choice[2],
        BYTES=x.element_size(), num_warps=num_warps or choice[3], **pdl_options(x.device),
    )  # fmt: skip
    return out


def _small_config(n: int, k: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(BLOCK_N, BLOCK_K, stages, warps): narrow blocks, so that every multiprocessor has weights to read."""
    if dtype == torch.float32:
        return 16, 64, 3, 4
    return (16 if n <= 32768 else 32), 256, 4, 4


def _is_small(x: Tensor) -> bool:
    return x.shape[0] <= MAX_SMALL


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear`."""
    return _small(x, weight, bias) if _is_small(x) else F.linear(x, weight, bias)


def linear_add(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear_add`."""
    if _is_small(x):
        return _small(x, weight, bias, residual=residual)
    residual = residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.norm_linear`."""
    if _is_small(x):
        return _small(x, weight, bias, norm_weight=norm_weight, eps=eps)
    return F.linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_swiglu(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.norm_swiglu`."""
    if _is_small(x):
        return _small(x, weight, bias, norm_weight=norm_weight, eps=eps, swiglu=True)
    return silu_and_mul(F.linear(rms_norm(x, norm_weight, eps), weight, bias))
