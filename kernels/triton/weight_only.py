"""Weight-only GEMM and dequantisation, in Triton, for any form of quantised weight: x stays in floats."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.block_weight import BlockWeight
from kernels.data.capability import shared_memory
from kernels.data.quantized_weight import QuantizedWeight
from kernels.gpu.codes import values
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.triton import block_weight

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
    """out [M, N] from x [M, K]. The weight's rows are the rows of the tensor core's tile, tokens its columns.

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
    """Return the constants of kernels that read any kind of codes."""
    return {
        "K": weight.num_channels, "GROUP": weight.group, "ROWS": weight.rows, "KIND": weight.kind,
        "HALVES": 2 if weight.kind in FOUR_BITS else 1, "BY_ROW": weight.scale.stride(0),
        "BY_GROUP": weight.scale.stride(1), "ZERO": weight.zero is not None, "FACTOR": weight.factor is not None,
    }  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def dequantize(codes: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """See `kernels.reference.dequantize`."""
    if isinstance(weight, BlockWeight):
        return block_weight.dequantize(weight, dtype)
    out = torch.empty(len(weight), weight.num_channels, dtype=dtype, device=codes.device)
    block = min(next_power_of_2(codes.shape[1]), 2048)
    scale = _bytes(weight.scale)
    _dequantize_kernel[(len(weight), cdiv(codes.shape[1], block))](
        _words(codes, weight.kind), scale, _or(weight.zero, scale), _or(weight.factor, scale), _or(weight.order, scale),
        out, ORDER=weight.order is not None, BLOCK=block, num_warps=4, **_constants(weight),
    )  # fmt: skip
    return out


def _stages(block_m: int, block_n: int, block_k: int, halves: int, x: Tensor) -> int:
    """Loads of x and codes that are on their way at once: up to four, as many as shared memory has room for beside the
    tile that is multiplied.
    """
    loaded = block_k * (halves * block_m * x.element_size() + block_n)
    room = shared_memory(x.device) - block_k * block_n * x.element_size()
    return min(max(room // loaded, 1), 4)


def weight_only_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, block_m: int = 0, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute x [M, K] times the weight, plus bias [N] -> [M, N] `dtype`, by default x's. block_m: tokens of a tile;
    0: as suits their number.
    """
    num_tokens, n = len(x), len(weight)
    out = x.new_empty(num_tokens, n, dtype=dtype)
    block_m = block_m or min(max(next_power_of_2(num_tokens), 16), 64)
    block_n = 32 if n <= 8192 else 64
    scale, num_bytes = _bytes(weight.scale), weight.codes.shape[1]
    block_k = 128 if weight.group % 128 == num_bytes % 128 == 0 else 64
    stages = _stages(block_m, block_n, block_k, 2 if weight.kind in FOUR_BITS else 1, x)
    in_group = weight.scale.shape[1] == 1 or weight.group % block_k == num_bytes % block_k == 0
    _weight_only_kernel[(cdiv(n, block_n), cdiv(num_tokens, block_m))](
        x, _words(weight.codes, weight.kind), scale, _or(weight.zero, scale), _or(weight.factor, scale), _or(bias, x),
        out, num_tokens, x.stride(0), N=n, BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, IN_GROUP=in_group, num_warps=4, num_stages=stages,
        **_constants(weight), **pdl_options(x.device),
    )  # fmt: skip
    return out
