"""Quantised activations: rows of x to codes with scales, and the GEMM of such codes by those of a weight, in Triton.

x gets a scale for each token, or for each group of channels if the weight has them.
"""

# ruff: noqa: RUF005 - kernels have no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight
from kernels.gpu.launch import (
    EARLY,
    cdiv,
    launch_dependents,
    next_power_of_2,
    pdl_options,
    wait_for_inputs,
)
from kernels.gpu.rounding import LARGEST, group_of, normed_row, rounded, store_rounded
from kernels.triton.norm import rms_norm


@triton.jit(do_not_specialize=["stride_row", "stride_group"])  # one is the number of rows
def _quantize_kernel(
    x, norm_weight, codes, scale, eps, stride_x, stride_row, stride_group,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LARGEST: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """codes [M, K] and scale [M, ceil(K / GROUP)], of any strides, of x [M, K], or of its norm: one program for a row.

    GROUP is a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    group, k = tl.arange(0, GROUPS)[:, None], tl.arange(0, GROUP)[None, :]
    channels = group * GROUP + k
    inside = channels < K
    if PDL:
        launch_dependents()
    if NORM:
        g = tl.load(norm_weight + channels, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        wait_for_inputs()
    values = tl.load(x + row * stride_x + channels, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        values = normed_row(values, g, eps, K, x.dtype.element_ty)
    store_rounded(values, codes, scale, row, group, channels, stride_row, stride_group, K, GROUP, LARGEST)


@triton.jit(do_not_specialize=["first"])
def _quantize_pairs_kernel(
    x, ids, positions, codes, scale, first, stride_x,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LARGEST: tl.constexpr, E: tl.constexpr,
    CHOSEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """codes [routed token in order, K] and scale [routed token in order, K / GROUP] of x [T, K]: a program rounds a
    token for all its routed tokens.

    Must follow `kernels.triton.pairs.sort_pairs`, which waits for x and ids before this kernel starts. This one waits
    for the sort before the next kernel starts, which then may read the tiles at once.
    """
    token = tl.program_id(0).to(tl.int64)
    group, k = tl.arange(0, GROUPS)[:, None], tl.arange(0, GROUP)[None, :]
    channels = group * GROUP + k
    inside = channels < K
    values = tl.load(x + token * stride_x + channels, mask=inside, other=0.0, cache_modifier=EARLY).to(tl.float32)
    result, largest = rounded(values, codes.dtype.element_ty, LARGEST)
    local_ids = ()
    for i in tl.static_range(CHOSEN):
        local_ids = local_ids + (tl.load(ids + token * CHOSEN + i, cache_modifier=EARLY) - first,)
    if PDL:
        wait_for_inputs()
        launch_dependents()
    rows = ()
    for i in tl.static_range(CHOSEN):
        local = (local_ids[i] >= 0) & (local_ids[i] < E)
        rows = rows + (tl.load(positions + token * CHOSEN + i, mask=local, other=-1).to(tl.int64),)
    for i in tl.static_range(CHOSEN):
        local = rows[i] >= 0
        tl.store(codes + rows[i] * K + channels, result, mask=inside & local)
        tl.store(scale + rows[i] * (K // GROUP) + group, largest, mask=(group * GROUP < K) & local)


@triton.jit(do_not_specialize=["num_tokens"])
def _scaled_kernel(
    x, codes, x_scale, scale, bias, out, num_tokens,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BY_ROW: tl.constexpr,
    BY_GROUP: tl.constexpr, BIAS: tl.constexpr, TILES: tl.constexpr, SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [M, N] from codes x [M, K], scaled by x_scale [M, K / GROUP], and codes [N, K], scaled by scale [N / ROWS, K
    / GROUP].

    Sums of a group are scaled before they are added up. TILES rows of tiles are done side by side, so that their x and
    weight are still in L2.
    """
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    num_m, num_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    first = pid // (TILES * num_n) * TILES
    height = tl.minimum(num_m - first, TILES)
    m = (first + pid % (TILES * num_n) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid % (TILES * num_n) // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tokens, rows = tl.minimum(m, num_tokens - 1).to(tl.int64), tl.minimum(n, N - 1).to(tl.int64)
    x_pointers = x + tokens[:, None] * K + k[None, :]
    w_pointers = codes + rows[None, :] * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], SUMS)
    for at in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            xk, wk = tl.load(x_pointers + at), tl.load(w_pointers + at)
        else:
            xk = tl.load(x_pointers + at, mask=(at + k < K)[None, :], other=0.0)
            wk = tl.load(w_pointers + at, mask=(at + k < K)[:, None], other=0.0)
        if GROUP < K:
            group = at // GROUP
            both = tl.load(x_scale + tokens * GROUPS + group)[:, None]
            both *= tl.load(scale + rows // ROWS * BY_ROW + group * BY_GROUP).to(tl.float32)[None, :]
            acc += tl.dot(xk, wk).to(tl.float32) * both
        else:
            total = tl.dot(xk, wk, total, out_dtype=SUMS)
    if GROUP >= K:
        acc = total.to(tl.float32) * tl.load(x_scale + tokens)[:, None]
        acc *= tl.load(scale + rows // ROWS).to(tl.float32)[None, :]
    if BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[None, :]
    mask = (m < num_tokens)[:, None] & (n < N)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=mask)


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype,
    *,
    group: int = 0,
    by_group: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.quantize_rows`; here also with a scale for each group [M, K / group], and of the norm of
    x.

    `by_group`: see `QuantizedRows.empty`.
    """
    out = QuantizedRows.empty(x, dtype, group, by_group)
    quantize_into(out, x, norm_weight, eps)
    return out.codes, out.scale


def quantize_into(out: QuantizedRows, x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0) -> None:
    """Quantise x [M, K], or its norm, into unwritten memory."""
    num_rows, k = x.shape
    assert x.stride(1) == 1
    if num_rows:
        block, width = group_of(out)
        _quantize_kernel[(num_rows,)](
            x, x if norm_weight is None else norm_weight, out.codes, out.scale, eps, x.stride(0), *out.scale.stride(),
            K=k, GROUP=width, GROUPS=block // width, LARGEST=LARGEST[out.codes.dtype], NORM=norm_weight is not None,
            num_warps=min(max(block // 1024, 1), 16), **pdl_options(x.device),
        )  # fmt: skip


def finish_norm(total: Tensor, norm: NextNorm) -> Tensor | QuantizedRows:
    """Return the norm of a sum that another kernel has written, quantised if `norm` says so."""
    if norm.rounded is None:
        return rms_norm(total, norm.weight, norm.eps)
    quantize_into(norm.rounded, total, norm.weight, norm.eps)
    return norm.rounded


def quantize_pairs(
    x: Tensor, dtype: torch.dtype, group: int, ids: Tensor, positions: Tensor, first: int, count: int
) -> tuple[Tensor, Tensor]:
    """Codes [routed tokens, K] and scales [routed tokens, K / group] of x [T, K], a row for each pair of a token and a
    local expert: `positions`.

    ids, positions [T, chosen] int32. Nothing is written to the rows of no routed token. See `_quantize_pairs_kernel`.
    """
    num_tokens, k = x.shape
    assert x.stride(1) == 1
    assert k % group == 0
    codes = torch.empty(ids.numel(), k, dtype=dtype, device=x.device)
    scale = torch.empty(ids.numel(), k // group, dtype=torch.float32, device=x.device)
    block = next_power_of_2(k)
    _quantize_pairs_kernel[(num_tokens,)](
        x, ids, positions, codes, scale, first, x.stride(0), K=k, GROUP=group, GROUPS=block // group,
        LARGEST=LARGEST[dtype], E=count, CHOSEN=ids.shape[1], num_warps=min(max(block // 1024, 1), 16),
        **pdl_options(x.device),
    )  # fmt: skip
    return codes, scale


def scaled_linear(
    codes: Tensor, x_scale: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute codes [M, K], scaled by x_scale, times the weight, plus bias [N] -> [M, N] of `dtype`."""
    num_tokens, n = len(codes), len(weight)
    out = torch.empty(num_tokens, n, dtype=dtype, device=codes.device)
    block_m = 64 if num_tokens <= 64 else 128
    grid = (cdiv(num_tokens, block_m) * cdiv(n, 128),)
    _scaled_kernel[grid](
        codes, weight.codes, x_scale, weight.scale, out if bias is None else bias, out, num_tokens, N=n,
        K=weight.num_channels, GROUP=weight.group, ROWS=weight.rows, BY_ROW=weight.scale.stride(0),
        BY_GROUP=weight.scale.stride(1), BIAS=bias is not None, TILES=8,
        SUMS=tl.int32 if weight.kind == "int8" else tl.float32, BLOCK_M=block_m, BLOCK_N=128, BLOCK_K=128,
        num_warps=4 if block_m == 64 else 8, num_stages=3,
    )  # fmt: skip
    return out
