"""Dequantisation of GGUF's blocks, see `kernels.data.block_weight`, in Triton."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.block_weight import BlockRows, BlockWeight, unit_channels
from kernels.gpu.launch import cdiv

UNITS = 4  # of a program


@triton.jit
def _six_bits(scale, at, group, NIBBLE: tl.constexpr):
    """The scale of a group, or with NIBBLE = 4 its minimum: six bits, from the twelve bytes at `at`."""
    own = tl.load(scale + at + NIBBLE + group % 4).to(tl.int32)
    both = tl.load(scale + at + 8 + group % 4).to(tl.int32)
    return tl.where(group < 4, own & 63, both >> NIBBLE & 15 | own >> 2 & 48)


@triton.jit
def _dequantize_kernel(
    low, high, scale, halves, factor, out,
    N: tl.constexpr, U: tl.constexpr, KIND: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """out [N, K]: one program for some units of a row. halves: the scales as float16."""
    CHANNELS: tl.constexpr = 128 if KIND == "q8_0" else 256
    n = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, UNITS * 32)
    unit = tl.program_id(1) * UNITS + word // 32
    inside = unit < U
    unit = tl.minimum(unit, U - 1)
    j = word % 32 // 4
    t = word % 4
    e = tl.arange(0, 4)
    here = n * U + unit
    codes = tl.load(low + here * 32 + j // 4 * 16 + t * 4 + j % 4)
    if KIND == "q6_k":
        above = tl.load(high + here * 16 + t * 4 + j // 2) >> 8 * (j % 2)
    elif KIND == "q5_k":
        above = tl.load(high + here * 8 + t * 2 + j // 4) >> 4 * (j % 4)
    at = unit.to(tl.int64) * N + n
    for half in tl.static_range(1 if KIND == "q8_0" else 2):
        shift = (16 * (e % 2) + 8 * (e // 2) + 4 * half)[None, :]
        if KIND == "q8_0":
            piece = j
            w = (codes[:, None] << 24 - shift >> 24).to(tl.float32)
            w *= tl.load(halves + at * 4 + j // 2).to(tl.float32)[:, None]
        elif KIND == "q6_k":
            piece = 2 * j + half
            bits = above[:, None] >> (16 * (e % 2) + 4 * (e // 2) + 2 * half)[None, :] & 3
            step = tl.load(scale + at * 16 + piece).to(tl.int8, bitcast=True).to(tl.float32)
            step *= tl.load(factor + at).to(tl.float32)
            w = ((codes[:, None] >> shift & 15 | bits << 4) - 32).to(tl.float32) * step[:, None]
        else:
            piece = j // 2 * 4 + half * 2 + j % 2
            group = j // 2 * 2 + half
            code = codes[:, None] >> shift & 15
            if KIND == "q5_k":
                code |= (above[:, None] >> (16 * (e % 2) + 2 * (e // 2) + half)[None, :] & 1) << 4
            step = tl.load(halves + at * 8).to(tl.float32) * _six_bits(scale, at * 16 + 4, group, 0).to(tl.float32)
            least = tl.load(halves + at * 8 + 1).to(tl.float32) * _six_bits(scale, at * 16 + 4, group, 4).to(tl.float32)
            w = code.to(tl.float32) * step[:, None] - least[:, None]
        channel = unit * CHANNELS + piece * 16 + t * 4
        into = out + (n * U * CHANNELS + channel)[:, None] + e[None, :]
        tl.store(into, w.to(out.dtype.element_ty), mask=inside[:, None])


def dequantize(weight: BlockWeight, dtype: torch.dtype) -> Tensor:
    """Return the whole matrix [N, K] in `dtype`, computed in float32."""
    out = torch.empty(len(weight), weight.num_channels, dtype=dtype, device=weight.device)
    first = 0
    for part in weight.parts:
        dequantize_rows(part, out[first : first + len(part)])
        first += len(part)
    return out


def dequantize_rows(rows: BlockRows, out: Tensor) -> None:
    """Dequantise to out [N, K], which is contiguous."""
    n, units = rows.low.shape[:2]
    assert out.is_contiguous()
    assert out.shape == (n, units * unit_channels(rows.kind))
    low, halves = rows.low.view(torch.int32), rows.scale.view(torch.float16)
    high = low if rows.high is None else rows.high.view(torch.int32)
    _dequantize_kernel[(n, cdiv(units, UNITS))](
        low, high, rows.scale, halves, halves if rows.factor is None else rows.factor, out, N=n, U=units,
        KIND=rows.kind, UNITS=UNITS, num_warps=4,
    )  # fmt: skip
