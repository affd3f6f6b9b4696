"""Products with matrices of few bits, in Triton.

Few tokens are bound by reading the weight, whose codes become floats in registers:
`kernels.gluon.linear.quantized_small_batch` where it applies, else the kernel here. Beyond `MAX_FEW` tokens, where the
checkpoint allows it, x is rounded, too, see `kernels.triton.scaled`. Else, beyond `MAX_WEIGHT_ONLY` tokens, the matrix
is written out as floats, for cuBLAS.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.data.quantized_rows import NextNorm, QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight
from kernels.gpu.codes import values
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.reference import Gate
from kernels.triton import scaled
from kernels.triton.activation import gate_and_mul
from kernels.triton.norm import rms_norm

if triton.__version__.startswith(("3.6.", "3.7.")):  # Gluon's interface is not stable: the versions it was checked on
    from kernels.gluon.linear import quantized_small_batch as few
    from kernels.gluon.linear import weight_only as dense
else:
    dense = few = None  # type: ignore[assignment]

MAX_FEW = 16  # tokens up to which x stays as it is: one tile of the matrix unit
MAX_WEIGHT_ONLY = 64  # tokens up to which the kernel here does better than cuBLAS with the matrix written out
FOUR_BITS = ("int4", "e2m1")


@triton.jit
def _scales(stored):
    """Scales as float32. uint8 ones are e4m3."""
    if stored.dtype == tl.uint8:
        return (stored.to(tl.uint32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return stored.to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def _weight_only_kernel(
    x, codes, scale, zero, factor, bias, out, num_tokens, stride_x,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    BY_ROW: tl.constexpr, BY_GROUP: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr,
    IN_GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K]. The weight's rows are the rows of the matrix unit's tile, tokens its columns.

    BY_ROW and BY_GROUP: strides of scales and zero points. IN_GROUP: BLOCK_K channels always have one scale; else each
    channel is multiplied by its own.
    """
    BYTES: tl.constexpr = K // HALVES
    WORD: tl.constexpr = 4 if KIND == "e2m1" else 1  # bytes that are loaded as one number
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, BLOCK_K // WORD)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    tokens = tl.minimum(m, num_tokens - 1).to(tl.int64)
    words = codes + rows[:, None] * (BYTES // WORD) + word[None, :]
    if PDL:
        launch_dependents()
        wait_for_inputs()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(0, BYTES, BLOCK_K):
        inside = at + k < BYTES
        parts = values(tl.load(words + at // WORD, mask=(at // WORD + word < BYTES // WORD)[None, :], other=0), KIND)
        for half in tl.static_range(HALVES):
            channels = half * BYTES + at + k
            xk = tl.load(x + tokens[None, :] * stride_x + channels[:, None], mask=inside[:, None], other=0.0)
            w = parts[half]
            if IN_GROUP:
                group = (half * BYTES + at) // GROUP
                if ZERO:
                    w -= tl.load(zero + rows * BY_ROW + group * BY_GROUP).to(tl.float32)[:, None]
                products = tl.dot(w.to(xk.dtype), xk, input_precision="ieee")
                acc += products * _scales(tl.load(scale + rows // ROWS * BY_ROW + group * BY_GROUP))[:, None]
            else:
                groups = (rows // ROWS * BY_ROW)[:, None] + (channels // GROUP * BY_GROUP)[None, :]
                if ZERO:
                    zeros = rows[:, None] * BY_ROW + (channels // GROUP * BY_GROUP)[None, :]
                    w -= tl.load(zero + zeros, mask=inside[None, :], other=0).to(tl.float32)
                w *= _scales(tl.load(scale + groups, mask=inside[None, :], other=0))
                acc += tl.dot(w.to(xk.dtype), xk, input_precision="ieee")
    if FACTOR:
        acc *= tl.load(factor + rows)[:, None]
    if BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    mask = (n < N)[:, None] & (m < num_tokens)[None, :]
    tl.store(out + m.to(tl.int64)[None, :] * N + n[:, None], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_kernel(
    codes, scale, zero, factor, order, out,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    BY_ROW: tl.constexpr, BY_GROUP: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr, ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [N, K]: one program for a piece of a row of codes."""
    BYTES: tl.constexpr = K // HALVES
    WORD: tl.constexpr = 4 if KIND == "e2m1" else 1  # bytes that are loaded as one number
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < BYTES
    word = tl.program_id(1) * (BLOCK // WORD) + tl.arange(0, BLOCK // WORD)
    parts = values(tl.load(codes + n * (BYTES // WORD) + word, mask=word < BYTES // WORD, other=0), KIND)
    for half in tl.static_range(HALVES):
        channels = half * BYTES + k
        w = parts[half]
        if ZERO:
            w -= tl.load(zero + n * BY_ROW + channels // GROUP * BY_GROUP, mask=inside, other=0).to(tl.float32)
        w *= _scales(tl.load(scale + n // ROWS * BY_ROW + channels // GROUP * BY_GROUP, mask=inside, other=0))
        if FACTOR:
            w *= tl.load(factor + n)
        if ORDER:
            channels = tl.load(order + channels, mask=inside, other=0)
        tl.store(out + n * K + channels, w.to(out.dtype.element_ty), mask=inside)


def _bytes(tensor: Tensor) -> Tensor:
    """e4m3 as bytes: not every GPU converts it, and its bits say it all."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.int8) else tensor


def _words(codes: Tensor, kind: str) -> Tensor:
    """Codes as `values` takes them."""
    return codes.view(torch.int32) if kind == "e2m1" else _bytes(codes)


def _constants(weight: QuantizedWeight) -> dict[str, Any]:
    """What the kernels that read any kind are compiled for."""
    return {
        "K": weight.num_channels, "GROUP": weight.group, "ROWS": weight.rows, "KIND": weight.kind,
        "HALVES": 2 if weight.kind in FOUR_BITS else 1, "BY_ROW": weight.scale.stride(0), "BY_GROUP": weight.scale.stride(1),
        "ZERO": weight.zero is not None, "FACTOR": weight.factor is not None,
    }  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def dequantize(codes: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """See `kernels.reference.dequantize`."""
    out = torch.empty(len(weight), weight.num_channels, dtype=dtype, device=codes.device)
    block = min(next_power_of_2(codes.shape[1]), 2048)
    scale = _bytes(weight.scale)
    _dequantize_kernel[(len(weight), cdiv(codes.shape[1], block))](
        _words(codes, weight.kind), scale, _or(weight.zero, scale), _or(weight.factor, scale), _or(weight.order, scale), out,
        ORDER=weight.order is not None, BLOCK=block, num_warps=4, **_constants(weight),
    )  # fmt: skip
    return out


def _weight_only(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    num_tokens, n = len(x), len(weight)
    out = x.new_empty(num_tokens, n)
    block_m = min(max(next_power_of_2(num_tokens), 16), 64)
    block_n = 32 if n <= 8192 else 64
    scale, num_bytes = _bytes(weight.scale), weight.codes.shape[1]
    block_k = 128 if weight.group % 128 == num_bytes % 128 == 0 else 64
    in_group = weight.scale.shape[1] == 1 or weight.group % block_k == num_bytes % block_k == 0
    _weight_only_kernel[(cdiv(n, block_n), cdiv(num_tokens, block_m))](
        x, _words(weight.codes, weight.kind), scale, _or(weight.zero, scale), _or(weight.factor, scale), _or(bias, x), out,
        num_tokens, x.stride(0), N=n, BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, IN_GROUP=in_group, num_warps=4, num_stages=4,
        **_constants(weight), **pdl_options(x.device),
    )  # fmt: skip
    return out


def _rounds(x: Tensor, weight: QuantizedWeight) -> bool:
    """Whether x is to be rounded, too: allowed, worth it, and in a form that the kernel multiplies."""
    return (
        weight.rounds_activations
        and len(x) > MAX_FEW
        and weight.zero is None
        and weight.factor is None
        and (weight.scale.shape[1] == 1 or weight.group % 128 == 0)
        and (weight.kind == "int8" or (weight.kind == "e4m3" and scaled.multiplies_e4m3(x.device)))
    )


def _empty(x: Tensor, weight: QuantizedWeight, swiglu: bool) -> Tensor:
    return x.new_empty(len(x), len(weight) // (2 if swiglu else 1))


def _multiply(
    x: Tensor | QuantizedRows,
    weight: QuantizedWeight,
    bias: Tensor | None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K], or its norm, times the weight, plus bias, and SwiGLU of that; in `residual`, added to it, or in
    `out`.
    """
    if isinstance(x, QuantizedRows):
        assert norm_weight is None
        assert out is None
        return scaled.multiply(x, weight, bias, swiglu=swiglu, residual=residual)
    if weight.order is not None:
        x, norm_weight = x[:, weight.order], None if norm_weight is None else norm_weight[weight.order]
        weight = dataclasses.replace(weight, order=None)
    into = out if residual is None else residual  # of the kernels that do all in one
    few_config = few.config(x, weight, swiglu) if few is not None else None
    if few_config is not None:
        into = _empty(x, weight, swiglu) if into is None else into
        few.launch(
            x, weight, bias, into, few_config, norm_weight=norm_weight, eps=eps, swiglu=swiglu, residual=residual
        )
        return into
    if _rounds(x, weight):
        result = scaled.multiply(x, weight, bias, norm_weight=norm_weight, eps=eps, swiglu=swiglu, residual=residual)
        return result if out is None else out.copy_(result)
    dense_config = dense.config(x, weight, swiglu) if dense is not None else None
    if dense_config is not None:
        into = _empty(x, weight, swiglu) if into is None else into
        x = dense.in_order(x, weight, norm_weight, eps)
        dense.launch(x, weight, bias, into, dense_config, residual=residual, swiglu=swiglu)
        return into
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if len(x) > MAX_WEIGHT_ONLY:
        result = F.linear(x, dequantize(weight.codes, weight, x.dtype), bias)
    else:
        result = _weight_only(x, weight, bias)
    if swiglu:
        result = gate_and_mul(result, "silu")
    if residual is not None:
        return residual.add_(result)
    return result if out is None else out.copy_(result)


def linear(x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear`."""
    return _multiply(x, weight, bias)


def linear_add(
    residual: Tensor, x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None = None
) -> Tensor:
    """See `kernels.reference.linear_add`."""
    return _multiply(x, weight, bias, residual=residual)


def linear_gated(
    x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None = None, gate: Gate = "silu"
) -> Tensor:
    """See `kernels.reference.linear_gated`."""
    if gate != "silu":
        return gate_and_mul(_multiply(x, weight, bias), gate)
    return _multiply(x, weight, bias, swiglu=True)


def linear_add_norm(
    residual: Tensor, x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None, norm: NextNorm
) -> Tensor | QuantizedRows:
    """See `kernels.reference.linear_add_norm`."""
    if isinstance(x, QuantizedRows) or _takes_codes(x, weight, False):
        return scaled.multiply_add_norm(residual, x, weight, bias, norm)
    return scaled.finish_norm(linear_add(residual, x, weight, bias), norm)


def quantized_input(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, gate: Gate | None = None
) -> QuantizedRows | None:
    """See `kernels.reference.quantized_input`."""
    swiglu = gate == "silu"
    return scaled.unwritten(x, weight, bias, swiglu) if _takes_codes(x, weight, swiglu) else None


def _takes_codes(x: Tensor, weight: QuantizedWeight, swiglu: bool) -> bool:
    """Whether `_multiply` rounds x, whose channels are in order."""
    is_few = few is not None and few.config(x, weight, swiglu) is not None
    return weight.order is None and not is_few and _rounds(x, weight)


def norms_apart(x: Tensor, weight: QuantizedWeight, gate: Gate | None = None) -> bool:
    """See `kernels.reference.norms_apart`. A kernel that rounds x, or brings it into order, also computes the norm."""
    weight, swiglu = dataclasses.replace(weight, order=None), gate == "silu"
    return (
        (few is None or few.config(x, weight, swiglu) is None)
        and not _rounds(x, weight)
        and (dense is None or dense.config(x, weight, swiglu) is None)
    )


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.norm_linear`."""
    return _multiply(x, weight, bias, norm_weight=norm_weight, eps=eps, out=out)


def norm_gated(
    x: Tensor, norm_weight: Tensor, eps: float, weight: QuantizedWeight, bias: Tensor | None = None, gate: Gate = "silu"
) -> Tensor:
    """See `kernels.reference.norm_gated`."""
    if gate != "silu":
        return gate_and_mul(_multiply(x, weight, bias, norm_weight=norm_weight, eps=eps), gate)
    return _multiply(x, weight, bias, norm_weight=norm_weight, eps=eps, swiglu=True)
