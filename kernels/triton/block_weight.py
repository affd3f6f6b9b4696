"""GEMM and dequantisation of GGUF's blocks, see `kernels.data.block_weight`, in Triton."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.data.block_weight import BlockRows, BlockWeight, unit_channels
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.gpu.parts import sum_parts

ROWS = 64  # of a GEMM's tile


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
    of_program = min(next_power_of_2(units), 16)
    _dequantize_kernel[(n, cdiv(units, of_program))](
        low, high, rows.scale, halves, halves if rows.factor is None else rows.factor, out, N=n, U=units,
        KIND=rows.kind, UNITS=of_program, num_warps=4,
    )  # fmt: skip


@triton.jit
def _half_of_unit(
    words, above, scale, halves, factor, at,
    HALF: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The weights [ROWS, 128] float32 of one half of the bytes of a unit, in the order of memory, see `_channels`.

    words, above: `low` and `high` [ROWS, ...]; at: of the rows' scales.
    """
    e = tl.arange(0, 4)
    shift = (16 * (e % 2) + 8 * (e // 2) + 4 * HALF)[None, None, :]
    GROUPS: tl.constexpr = 8 if KIND == "q6_k" else 4
    g = tl.arange(0, GROUPS)
    if KIND == "q8_0":
        codes = words[:, :, None] << 24 - shift >> 24
        step = tl.load(halves + at[:, None] * 4 + g[None, :]).to(tl.float32)
    else:
        codes = words[:, :, None] >> shift & 15
        if KIND == "q6_k":  # words of `above`: [t, pair of words]; those of codes: [h, t, pair of words mod 2, k]
            bits = tl.reshape(tl.permute(tl.reshape(above, [ROWS, 4, 2, 2]), [0, 2, 1, 3]), [ROWS, 16])
            bits = tl.reshape(bits[:, :, None] >> 8 * tl.arange(0, 2)[None, None, :], [ROWS, 32])
            own = (16 * (e % 2) + 4 * (e // 2) + 2 * HALF)[None, None, :]
            codes = (codes | (bits[:, :, None] >> own & 3) << 4) - 32
            step = tl.load(scale + at[:, None] * 16 + 2 * g[None, :] + HALF).to(tl.int8, bitcast=True).to(tl.float32)
            step *= tl.load(factor + at).to(tl.float32)[:, None]
        else:
            if KIND == "q5_k":  # words of `above`: [t, h]
                bits = tl.reshape(tl.permute(tl.reshape(above, [ROWS, 4, 2]), [0, 2, 1]), [ROWS, 8])
                bits = tl.reshape(bits[:, :, None] >> 4 * tl.arange(0, 4)[None, None, :], [ROWS, 32])
                own = (16 * (e % 2) + 2 * (e // 2) + HALF)[None, None, :]
                codes |= (bits[:, :, None] >> own & 1) << 4
            group = (2 * g + HALF)[None, :]
            rows = (at * 16 + 4)[:, None]
            step = tl.load(halves + at * 8).to(tl.float32)[:, None] * _six_bits(scale, rows, group, 0).to(tl.float32)
            least = tl.load(halves + at * 8 + 1).to(tl.float32)[:, None]
            least *= _six_bits(scale, rows, group, 4).to(tl.float32)
    # Half of the words, thread, group, the rest of the thread's words and their channels.
    BY_HALF: tl.constexpr = GROUPS // 2
    w = tl.reshape(codes.to(tl.float32), [ROWS, 2, 4, BY_HALF, 16 // BY_HALF])
    w *= tl.reshape(step, [ROWS, 2, 1, BY_HALF, 1])
    if KIND == "q4_k" or KIND == "q5_k":
        w -= tl.reshape(least, [ROWS, 2, 1, BY_HALF, 1])
    return tl.reshape(w, [ROWS, 128])


@triton.jit
def _channels(HALF: tl.constexpr, KIND: tl.constexpr):
    """Channels of a unit in the order of `_half_of_unit`: half of the words, thread, word, channel."""
    k = tl.arange(0, 128)
    j = k // 64 * 4 + k // 4 % 4
    own = k // 16 % 4 * 4 + k % 4
    if KIND == "q8_0":
        piece = j
    elif KIND == "q6_k":
        piece = 2 * j + HALF
    else:
        piece = j // 2 * 4 + 2 * HALF + j % 2
    return tl.max_contiguous(tl.multiple_of(piece * 16 + own, [4]), [4])


@triton.jit(do_not_specialize=["num_tokens"])
def _block_gemm_kernel(
    x, low, high, scale, halves, factor, out, num_tokens, stride_x, stride_out, stride_part,
    N: tl.constexpr, U: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [PARTS, M, N]: sums of x [M, K] times the rows, over the units of each part. Rows are the rows of the tensor
    core's tile, tokens its columns.
    """
    CHANNELS: tl.constexpr = 128 if KIND == "q8_0" else 256
    OWN: tl.constexpr = (U + PARTS - 1) // PARTS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(2) * OWN
    rows = tl.minimum(n, N - 1)
    tokens = tl.minimum(m, num_tokens - 1).to(tl.int64)
    words_at = low + rows.to(tl.int64)[:, None] * (U * 32) + tl.arange(0, 32)[None, :]
    if KIND == "q5_k":
        above_at = high + rows.to(tl.int64)[:, None] * (U * 8) + tl.arange(0, 8)[None, :]
    elif KIND == "q6_k":
        above_at = high + rows.to(tl.int64)[:, None] * (U * 16) + tl.arange(0, 16)[None, :]
    if PDL:
        launch_dependents()
        wait_for_inputs()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for unit in range(first, tl.minimum(first + OWN, U)):
        words = tl.load(words_at + unit * 32)
        above = words
        if KIND == "q5_k":
            above = tl.load(above_at + unit * 8)
        elif KIND == "q6_k":
            above = tl.load(above_at + unit * 16)
        at = unit * N + rows
        for half in tl.static_range(1 if KIND == "q8_0" else 2):
            channels = unit * CHANNELS + _channels(half, KIND)
            xk = tl.load(x + tokens[None, :] * stride_x + channels[:, None])
            w = _half_of_unit(words, above, scale, halves, factor, at, half, KIND, BLOCK_N)
            acc += tl.dot(w.to(xk.dtype), xk, input_precision="ieee")
    mask = (n < N)[:, None] & (m < num_tokens)[None, :]
    into = out + tl.program_id(2).to(tl.int64) * stride_part + m.to(tl.int64)[None, :] * stride_out + n[:, None]
    tl.store(into, acc.to(out.dtype.element_ty), mask=mask)


def block_gemm(x: Tensor, weight: BlockWeight, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Compute x [M, K] times the weight, plus bias [N] -> [M, N], added to `residual` where that is given."""
    num_tokens, n = len(x), len(weight)
    block_m = min(max(next_power_of_2(num_tokens), 16), 64)
    tiles = sum(cdiv(len(part), ROWS) for part in weight.parts) * cdiv(num_tokens, block_m)
    parts = max(min(264 // tiles, 8, weight.parts[0].low.shape[1] // 4), 1)
    is_sum = parts > 1 or bias is not None or residual is not None
    sums = x.new_empty(parts, num_tokens, n, dtype=torch.float32 if is_sum else x.dtype)
    first = 0
    for rows in weight.parts:
        own, units = len(rows), rows.low.shape[1]
        low, halves = rows.low.view(torch.int32), rows.scale.view(torch.float16)
        high = low if rows.high is None else rows.high.view(torch.int32)
        _block_gemm_kernel[(cdiv(own, ROWS), cdiv(num_tokens, block_m), parts)](
            x, low, high, rows.scale, halves, halves if rows.factor is None else rows.factor, sums[:, :, first:],
            num_tokens, x.stride(0), n, num_tokens * n, N=own, U=units, KIND=rows.kind, PARTS=parts, BLOCK_N=ROWS,
            BLOCK_M=block_m, num_warps=4, num_stages=2, **pdl_options(x.device),
        )  # fmt: skip
        first += own
    if not is_sum:
        return sums[0]
    return sum_parts(sums, x.new_empty(num_tokens, n) if residual is None else residual, bias=bias, residual=residual)
