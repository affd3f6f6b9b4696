"""Rounding rows to codes, and norms of sums, rounded or not, in Triton: what kernels that write a row end with."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.gpu.launch import next_power_of_2

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LARGEST = {torch.float8_e4m3fn: tl.constexpr(448.0), torch.int8: tl.constexpr(127.0)}


@triton.jit
def norm_factor(values, eps, HIDDEN: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of a row of float32. Squares are added up as integers, multiples of 2⁻⁴⁰ of the
    largest's power of two, so the order does not matter, and any kernel may compute it.
    """
    exponent = tl.max(tl.abs(values)).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 1 << 23), 253 << 23)
    unit = exponent.to(tl.float32, bitcast=True)
    scaled = values * ((254 << 23) - exponent).to(tl.float32, bitcast=True)  # less than 2
    total = tl.sum((scaled * scaled * 1099511627776.0).to(tl.int64)).to(tl.float32)
    return tl.rsqrt(total * (unit * unit) / (1099511627776.0 * HIDDEN) + eps)


@triton.jit
def normed_row(values, w, eps, HIDDEN: tl.constexpr, dtype: tl.constexpr, EXACT: tl.constexpr = False):
    """RMSNorm of a row, 0 beyond HIDDEN, rounded to `dtype` before the weight and after it; all float32.

    EXACT: by `norm_factor`.
    """
    if EXACT:
        scale = norm_factor(values, eps, HIDDEN)
    else:
        scale = tl.rsqrt(tl.sum(values * values) / HIDDEN + eps)
    return ((values * scale).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)


@triton.jit
def rounded(values, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Codes of values [GROUPS, GROUP], and the groups' scales [GROUPS, 1]."""
    scale = tl.maximum(tl.max(tl.abs(values), 1, keep_dims=True), 1e-12) / LARGEST
    result = values / scale
    if dtype == tl.int8:
        result = tl.where(result < 0, result - 0.5, result + 0.5)
    return result.to(dtype), scale


@triton.jit
def store_rounded(
    values, codes, scale, row, group, channels, stride_row, stride_group,
    K: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Store a row's codes in codes [M, K], and its groups' scales in scale [M, ceil(K / GROUP)], of any strides."""
    result, largest = rounded(values, codes.dtype.element_ty, LARGEST)
    tl.store(codes + row * K + channels, result, mask=channels < K)
    tl.store(scale + row * stride_row + group * stride_group, largest, mask=group * GROUP < K)


@triton.jit
def store_norm(
    values, weight, eps, out, scale, row, group, channels, stride_row, stride_group,
    K: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Store the norm of a row's values [GROUPS, GROUP] in out [M, K]; rounded unless LARGEST is 0, see
    `store_rounded`.
    """
    w = tl.load(weight + channels, mask=channels < K, other=0.0).to(tl.float32)
    normed = normed_row(values, w, eps, K, dtype)
    if LARGEST == 0:
        tl.store(out + row * K + channels, normed.to(dtype), mask=channels < K)
    else:
        store_rounded(normed, out, scale, row, group, channels, stride_row, stride_group, K, GROUP, LARGEST)


def group_of(out: QuantizedRows) -> tuple[int, int]:
    """The power of two that holds a row, and that which holds a group."""
    block = next_power_of_2(out.codes.shape[1])
    return block, out.group or block


def norm_arguments(total: Tensor, norm: NextNorm) -> tuple[Tensor | QuantizedRows, tuple[Any, ...], dict[str, Any]]:
    """For a kernel that computes the norm of its sum [M, n] by `store_norm`: the result, then weight, out, scale, eps
    and strides, and the constants BLOCK, GROUP and LARGEST."""
    if norm.rounded is None:
        out = torch.empty(total.shape, dtype=total.dtype, device=total.device)
        block = next_power_of_2(total.shape[1])
        return out, (norm.weight, out, out, norm.eps, 0, 0), {"BLOCK": block, "GROUP": block, "LARGEST": 0}
    into = norm.rounded
    block, group = group_of(into)
    options = {"BLOCK": block, "GROUP": group, "LARGEST": LARGEST[into.codes.dtype]}
    return into, (norm.weight, into.codes, into.scale, norm.eps, *into.scale.stride()), options
