"""GEMM of each head with one order of sums, in Triton: the same tile whatever the number of tokens."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import cdiv

TILE_TOKENS = 64


@triton.jit(do_not_specialize=["num_tokens"])
def _fixed_heads_kernel(
    x, weight, out, num_tokens, stride_xt, stride_xh, stride_wh, stride_wn, stride_wk, stride_ot, stride_oh,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N outputs of BLOCK_M tokens and a head: out [T, H, N] from x [T, H, K]."""
    head = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tokens = tl.minimum(m, num_tokens - 1).to(tl.int64)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    from_x = x + tokens[:, None] * stride_xt + head * stride_xh
    from_weight = weight + head * stride_wh + rows[None, :] * stride_wn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, K, BLOCK_K):
        inside = at + k < K
        xk = tl.load(from_x + (at + k)[None, :], mask=inside[None, :], other=0.0)
        wk = tl.load(from_weight + (at + k).to(tl.int64)[:, None] * stride_wk, mask=inside[:, None], other=0.0)
        acc = tl.dot(xk, wk, acc, input_precision="ieee")
    to = out + tokens[:, None] * stride_ot + head * stride_oh + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(m < num_tokens)[:, None] & (n < N)[None, :])


def fixed_heads(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Multiply each head's vectors by its matrix: x [T, H, K], weight [H, N, K] -> out [T, H, N].

    The last dimensions of x and `out` must be contiguous. All other strides are free.
    """
    (num_tokens, num_heads, k), n = x.shape, weight.shape[1]
    assert x.stride(2) == out.stride(2) == 1
    if num_tokens:
        block_m, block_n, block_k = (32, 32, 32) if x.itemsize == 4 else (TILE_TOKENS, 64, 64)
        _fixed_heads_kernel[(cdiv(n, block_n), cdiv(num_tokens, block_m), num_heads)](
            x, weight, out, num_tokens, x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1),
            N=n, K=k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out
