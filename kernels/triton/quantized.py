"""Products with matrices of few bits, in Triton.

Few tokens are bound by reading the weight, whose codes become floats in registers: `kernels.hopper.quantized_few` where it
applies, else the kernel here. Beyond `MAX_FEW` tokens, where the checkpoint allows it, x is rounded to e4m3 or int8, too, with
a scale for each token (for each group of channels, if the weight has them), and the matrix unit multiplies codes. Else, beyond
`MAX_WEIGHT_ONLY` tokens, the matrix is written out as floats, for cuBLAS.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.quantized_weight import QuantizedWeight
from kernels.reference import Gate
from kernels.triton.activation import gate_and_mul
from kernels.triton.codes import values
from kernels.triton.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.triton.norm import rms_norm

if triton.__version__.startswith(("3.6.", "3.7.")):  # Gluon's interface is not stable: the versions it was checked on
    from kernels.hopper import quantized_dense as dense
    from kernels.hopper import quantized_few as few
    from kernels.hopper import quantized_tiles as tiles
else:
    dense = few = tiles = None  # type: ignore[assignment]

MAX_FEW = 16  # tokens up to which x stays as it is: one tile of the matrix unit
MAX_WEIGHT_ONLY = 64  # tokens up to which the kernel here does better than cuBLAS with the matrix written out
FOUR_BITS = ("int4", "e2m1")
LARGEST = {torch.float8_e4m3fn: tl.constexpr(448.0), torch.int8: tl.constexpr(127.0)}


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


@triton.jit
def _quantize_kernel(
    x, norm_weight, order, codes, scale, eps, stride_x, stride_row, stride_group,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LARGEST: tl.constexpr, NORM: tl.constexpr,
    CHOSEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """codes [M, K] and scale [M, ceil(K / GROUP)], of any strides, of x [M, K], or of its norm: one program for a row.

    With CHOSEN: x has a row for each token, `order` [M] is of pairs, of which each token has so many. GROUP is a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    group, k = tl.arange(0, GROUPS)[:, None], tl.arange(0, GROUP)[None, :]
    channels = group * GROUP + k
    inside = channels < K
    if PDL:
        launch_dependents()
        wait_for_inputs()
    if CHOSEN:
        source = tl.load(order + row).to(tl.int64) // CHOSEN
    else:
        source = row
    values = tl.load(x + source * stride_x + channels, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        g = tl.load(norm_weight + channels, mask=inside, other=0.0).to(tl.float32)
        values = values * tl.rsqrt(tl.sum(tl.sum(values * values, 1), 0) / K + eps)
        values = values.to(x.dtype.element_ty).to(tl.float32) * g
        values = values.to(x.dtype.element_ty).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), 1, keep_dims=True), 1e-12) / LARGEST  # [GROUPS, 1]
    rounded = values / largest
    if codes.dtype.element_ty == tl.int8:
        rounded = tl.where(rounded < 0, rounded - 0.5, rounded + 0.5)
    tl.store(codes + row * K + channels, rounded.to(codes.dtype.element_ty), mask=inside)
    tl.store(scale + row * stride_row + group * stride_group, largest, mask=group * GROUP < K)


@triton.jit(do_not_specialize=["num_tokens"])
def _scaled_kernel(
    x, codes, x_scale, scale, bias, out, num_tokens,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BY_ROW: tl.constexpr, BY_GROUP: tl.constexpr,
    BIAS: tl.constexpr, TILES: tl.constexpr, SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [M, N] from codes x [M, K], scaled by x_scale [M, K / GROUP], and codes [N, K], scaled by scale [N / ROWS, K / GROUP].

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


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype,
    *,
    group: int = 0,
    by_group: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    order: Tensor | None = None,
    chosen: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.quantize_rows`; here also with a scale for each group [M, K / group], and of the norm of x.

    `by_group`: a group's scales lie side by side in memory, and the number of rows is rounded up to a multiple of 4. Nothing
    is written to the last ones. `order` [pairs] int32: a row for each pair, that of its token; each token has `chosen`.
    """
    assert (order is None) == (chosen == 0)
    k = x.shape[1]
    num_rows = len(x) if order is None else len(order)
    block = next_power_of_2(k)
    width = group or block
    num_codes = cdiv(num_rows, 4) * 4 if by_group else num_rows
    codes = torch.empty(num_codes, k, dtype=dtype, device=x.device)
    shape = (num_codes, cdiv(k, width))
    strides = (1, num_codes) if by_group else (shape[1], 1)
    scale = torch.empty_strided(shape, strides, dtype=torch.float32, device=x.device)
    assert x.stride(1) == 1
    if num_rows:
        _quantize_kernel[(num_rows,)](
            x, _or(norm_weight, x), _or(order, x), codes, scale, eps, x.stride(0), *strides, K=k, GROUP=width,
            GROUPS=block // width, LARGEST=LARGEST[dtype], NORM=norm_weight is not None, CHOSEN=chosen,
            num_warps=min(max(block // 1024, 1), 16), **pdl_options(x.device),
        )  # fmt: skip
    return codes, scale


@functools.cache
def _multiplies_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


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


def _rounded(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm_weight: Tensor | None, eps: float) -> Tensor:
    """The product of x, or its norm, rounded to codes, and the weight's."""
    num_tokens, n, k = len(x), len(weight), weight.num_channels
    group = 0 if weight.scale.shape[1] == 1 else weight.group
    cublas = _by_cublas(x, weight)
    codes, scale = quantize_rows(
        x, weight.codes.dtype, group=group, by_group=cublas and group > 0, norm_weight=norm_weight, eps=eps
    )
    if cublas:
        options: dict[str, Any] = {"out_dtype": x.dtype, "use_fast_accum": group == 0}
        if group == 0:
            options["bias"] = bias
        out = torch._scaled_mm(codes, weight.codes.t(), scale, weight.scale.float().t(), **options)[:num_tokens]
        return out if bias is None or group == 0 else out.add_(bias)
    out = torch.empty(num_tokens, n, dtype=x.dtype, device=x.device)
    block_m = 64 if num_tokens <= 64 else 128
    grid = (cdiv(num_tokens, block_m) * cdiv(n, 128),)
    _scaled_kernel[grid](
        codes, weight.codes, scale, weight.scale, _or(bias, out), out, num_tokens, N=n, K=k, GROUP=weight.group,
        ROWS=weight.rows, BY_ROW=weight.scale.stride(0), BY_GROUP=weight.scale.stride(1), BIAS=bias is not None, TILES=8,
        SUMS=tl.int32 if weight.kind == "int8" else tl.float32, BLOCK_M=block_m, BLOCK_N=128, BLOCK_K=128,
        num_warps=4 if block_m == 64 else 8, num_stages=3,
    )  # fmt: skip
    return out


def _by_cublas(x: Tensor, weight: QuantizedWeight) -> bool:
    """Whether cuBLAS multiplies these codes: e4m3, scaled by row, or on Hopper by block of 128 × 128."""
    n, k = len(weight), weight.num_channels
    by_row = weight.scale.shape == (n, 1)
    by_block = weight.group == weight.rows == 128 and n % 128 == k % 128 == 0 and _is_hopper(x.device)
    return (
        x.is_cuda
        and weight.kind == "e4m3"
        and (by_row or by_block)
        and x.dtype == torch.bfloat16
        and n % 16 == k % 16 == 0
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _rounds(x: Tensor, weight: QuantizedWeight) -> bool:
    """Whether x is to be rounded, too: allowed, worth it, and in a form that the kernel multiplies."""
    return (
        weight.rounds_activations
        and len(x) > MAX_FEW
        and weight.zero is None
        and weight.factor is None
        and (weight.scale.shape[1] == 1 or weight.group % 128 == 0)
        and (weight.kind == "int8" or (weight.kind == "e4m3" and _multiplies_e4m3(x.device)))
    )


def _empty(x: Tensor, weight: QuantizedWeight, swiglu: bool) -> Tensor:
    return x.new_empty(len(x), len(weight) // (2 if swiglu else 1))


def _multiply(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K], or its norm, times the weight, plus bias, and SwiGLU of that; in `residual`, added to it, or in `out`."""
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
        result = _rounded(x, weight, bias, norm_weight, eps)
    else:
        dense_config = dense.config(x, weight, swiglu) if dense is not None else None
        if dense_config is not None:
            into = _empty(x, weight, swiglu) if into is None else into
            x = dense.in_order(x, weight, norm_weight, eps)
            dense.launch(x, weight, bias, into, dense_config, residual=residual, swiglu=swiglu)
            return into
        if norm_weight is not None:
            x = rms_norm(x, norm_weight, eps)
        config = tiles.config(x, weight, swiglu) if tiles is not None else None
        if config is not None:
            into = _empty(x, weight, swiglu) if into is None else into
            tiles.launch(x, weight, bias, into, config, swiglu=swiglu, residual=residual)
            return into
        if len(x) > MAX_WEIGHT_ONLY:
            result = F.linear(x, dequantize(weight.codes, weight, x.dtype), bias)
        else:
            result = _weight_only(x, weight, bias)
    if swiglu:
        result = gate_and_mul(result, "silu")
    if residual is not None:
        return residual.add_(result)
    return result if out is None else out.copy_(result)


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear`."""
    return _multiply(x, weight, bias)


def linear_add(residual: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """See `kernels.reference.linear_add`."""
    return _multiply(x, weight, bias, residual=residual)


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
