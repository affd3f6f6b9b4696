"""GEMMs of up to 16 tokens with GGUF's blocks, in Gluon, with the norm before and the SwiGLU or sum after them.

A warp takes a unit of sixteen rows at a time, see `kernels.data.block_weight`, and asks for the next one before it
multiplies one: so each has some two kilobytes on their way. All loads of codes have 16 bytes for a thread, and codes go
from there to the tensor core's operands without another thread. Codes multiply x exactly; scales, as exact float32,
multiply the sums of their groups.
"""

# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef,var-annotated"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.data.block_weight import BlockRows, unit_channels
from kernels.data.fusion import Fusion
from kernels.gluon.common.activation import activate
from kernels.gluon.common.block_bits import (
    byte_times,
    decode_word,
    eight_bit_scales,
    float16_of,
    in_column,
    offset,
    signed_byte,
    six_bit_scales,
    six_bit_words,
)
from kernels.gluon.common.inverse_rms import inverse_rms
from kernels.gluon.common.layouts import last, middle, warps
from kernels.gpu.device import has_tensor_cores, num_multiprocessors
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs

ROWS = gl.constexpr(16)  # of a tile


@gluon.constexpr_function
def _own_words(warps, count):
    """Layout of words [warps, 16, 4 · count]: each of four threads of a row has `count` side by side."""
    registers = [[0, 0, 1 << i] for i in range(count.bit_length() - 1)] + [[0, 8, 0]]
    lanes = [[0, 0, count], [0, 0, 2 * count], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _of_warps(warps), [], [warps, 16, 4 * count])


@gluon.constexpr_function
def _shared_words(warps, count):
    """Layout of words [warps, 16, count]: all four threads of a row have all of them."""
    registers = [[0, 0, 1 << i] for i in range(count.bit_length() - 1)] + [[0, 8, 0]]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _of_warps(warps), [], [warps, 16, count])


@gluon.constexpr_function
def _piece_of_x(warps, tokens):
    """Layout of x [warps, 16 channels, tokens]: each of four threads of a token has four channels."""
    registers = [[0, 1, 0], [0, 2, 0]] + [[0, 0, 8 << i] for i in range((tokens // 8).bit_length() - 1)]
    lanes = [[0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, _of_warps(warps), [], [warps, 16, tokens])


@gluon.constexpr_function
def _of_warps(warps):
    return [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]


@gluon.jit
def _split_in_four(x):
    """[warps, rows, 4 · n] → the n first, second, third and fourth words of each four."""
    even, odd = gl.split(x.reshape([x.shape[0], x.shape[1], x.shape[2] // 4, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return a, b, c, d


@gluon.jit
def _words_above(words, KIND: gl.constexpr, LAYOUT: gl.constexpr):
    """The words of `BlockRows.high` that a thread has for a unit, [warps, rows, 4] each: two of q5_k, four of q6_k."""
    if KIND == "q5_k":
        first, second = gl.split(words.reshape([words.shape[0], words.shape[1], 4, 2]))
        return gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)
    else:
        a, b, c, d = _split_in_four(words)
        return (
            gl.convert_layout(a, LAYOUT),
            gl.convert_layout(b, LAYOUT),
            gl.convert_layout(c, LAYOUT),
            gl.convert_layout(d, LAYOUT),
        )


@gluon.jit
def _weights(unit, above, j: gl.constexpr, KIND: gl.constexpr, W: gl.constexpr):
    """The two pieces of word j of a unit, as the tensor core takes them; of q8_0 there is one."""
    WORD: gl.constexpr = _own_words(unit[0].shape[0], 1)
    words = gl.convert_layout(_split_in_four(unit[j // 4])[j % 4], WORD)
    bits = words
    if KIND == "q6_k":
        bits = above[j // 2] >> (8 * (j % 2))
    if KIND == "q5_k":
        bits = above[j // 4] >> (4 * (j % 4))
    return decode_word(words, bits, KIND, W)


@gluon.jit
def _load_unit(
    low, high, scale, factor, row, last_row, at,
    N: gl.constexpr, U: gl.constexpr, KIND: gl.constexpr, WARPS: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Words of the units `at` and after it, one for each warp, of the rows from `row` on."""
    WORDS: gl.constexpr = _own_words(WARPS, 4)
    FEW: gl.constexpr = _own_words(WARPS, 2)
    NUM: gl.constexpr = 2 if KIND == "q8_0" else 4
    SCALES: gl.constexpr = _shared_words(WARPS, NUM)
    unit = gl.minimum(at + warps(WORDS, WARPS), U - 1)
    index = gl.minimum(row + middle(WORDS, ROWS), last_row).to(gl.int64) * U + unit
    words = low + index * 32 + last(WORDS, 16)
    first = gl.load(words, eviction_policy="evict_first")
    second = gl.load(words + 16, eviction_policy="evict_first")
    above = first
    if KIND == "q6_k":
        above = gl.load(high + index * 16 + last(WORDS, 16), eviction_policy="evict_first")
    if KIND == "q5_k":
        unit = gl.minimum(at + warps(FEW, WARPS), U - 1)
        index = gl.minimum(row + middle(FEW, ROWS), last_row).to(gl.int64) * U + unit
        above = gl.load(high + index * 8 + last(FEW, 8), eviction_policy="evict_first")
    rows = gl.minimum(row + middle(SCALES, ROWS), last_row)
    unit = gl.minimum(at + warps(SCALES, WARPS), U - 1)
    scales = gl.load(scale + (unit * N + rows) * NUM + last(SCALES, NUM))
    factors = scales
    if KIND == "q6_k":
        rows = gl.minimum(row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, S)), last_row)[None, :]
        unit = gl.minimum(at + gl.arange(0, WARPS, layout=gl.SliceLayout(1, S)), U - 1)[:, None]
        factors = gl.load(factor + unit * N + rows)
    return first, second, above, scales, factors


@gluon.jit
def _load_piece(x, norm_weight, token, stride_x, at, WARPS: gl.constexpr, M: gl.constexpr, K: gl.constexpr,
                CHANNELS: gl.constexpr, NORM: gl.constexpr, X: gl.constexpr):  # fmt: skip
    """Sixteen channels of the tokens for each warp, those from `at` on for the first one; zero beyond K."""
    PIECE: gl.constexpr = _piece_of_x(WARPS, M)
    channels = at + warps(PIECE, WARPS) * CHANNELS + middle(PIECE, 16)
    inside = channels < K
    values = gl.load(x + token * stride_x + channels, mask=inside & (token >= 0), other=0.0)
    if NORM:
        values = values * gl.load(norm_weight + channels, mask=inside, other=0.0)
    return gl.convert_layout(values, X)


@gluon.jit
def _scale_words(unit, KIND: gl.constexpr, S: gl.constexpr):
    """The words of a unit's scales [warps, rows] int32: two of q8_0, else four."""
    words = unit[3]
    if KIND == "q8_0":
        a, b = gl.split(words)
        return gl.convert_layout(a, S), gl.convert_layout(b, S)
    else:
        a, b, c, d = _split_in_four(words)
        SHAPE: gl.constexpr = [words.shape[0], words.shape[1]]
        return (
            gl.convert_layout(a.reshape(SHAPE), S),
            gl.convert_layout(b.reshape(SHAPE), S),
            gl.convert_layout(c.reshape(SHAPE), S),
            gl.convert_layout(d.reshape(SHAPE), S),
        )


@gluon.jit
def _add_unit(
    total, unit, pieces, SHAPE: gl.constexpr, MMA: gl.constexpr, W: gl.constexpr, S: gl.constexpr, KIND: gl.constexpr
):
    """total + a unit's products with its pieces of x, whose columns are tokens."""
    ones = gl.full([SHAPE[0], ROWS, 16], offset(KIND), gl.bfloat16, W)
    none = gl.zeros(SHAPE, gl.float32, MMA)
    parts = _scale_words(unit, KIND, S)
    if KIND == "q8_0":
        scales = (float16_of(parts[0], 0), float16_of(parts[0], 1), float16_of(parts[1], 0), float16_of(parts[1], 1))
    elif KIND == "q6_k":
        scales = eight_bit_scales(parts[0], parts[1], parts[2], parts[3], unit[4].to(gl.float32))
    else:
        scales = six_bit_scales(parts[0], parts[1], parts[2], parts[3])
    above = ()
    if KIND == "q5_k" or KIND == "q6_k":
        above = _words_above(unit[2], KIND, _own_words(SHAPE[0], 1))
    low = none
    high = none
    low_x = none
    high_x = none
    for j in gl.static_range(8):
        first, second = _weights(unit, above, j, KIND, W)
        if KIND == "q6_k":
            sums = mma_v2(first, pieces[2 * j], mma_v2(ones, pieces[2 * j], none))
            total += sums * scales[2 * j][:, :, None]
            sums = mma_v2(second, pieces[2 * j + 1], mma_v2(ones, pieces[2 * j + 1], none))
            total += sums * scales[2 * j + 1][:, :, None]
        elif KIND == "q8_0":
            low = mma_v2(first, pieces[j], none if j % 2 == 0 else low)
            if j % 2 == 1:
                total += low * scales[j // 2][:, :, None]
        else:
            if j % 2 == 0:
                low_x = mma_v2(ones, pieces[2 * j + 1], mma_v2(ones, pieces[2 * j], none))
                high_x = mma_v2(ones, pieces[2 * j + 3], mma_v2(ones, pieces[2 * j + 2], none))
                low = low_x
                high = high_x
            low = mma_v2(first, pieces[2 * j - j % 2], low)
            high = mma_v2(second, pieces[2 * j - j % 2 + 2], high)
            if j % 2 == 1:
                total += low * scales[j - 1][:, :, None]
                total += low_x * scales[8 + j - 1][:, :, None]
                total += high * scales[j][:, :, None]
                total += high_x * scales[8 + j][:, :, None]
    return total


@gluon.jit
def _add_unit_of_one(
    total, unit, own, sums_of_x,
    SHAPE: gl.constexpr, MMA: gl.constexpr, W: gl.constexpr, X: gl.constexpr, S: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """total + a unit's products with one token's x, whose columns are groups, see `_load_own`.

    So the tensor core adds up the groups apart, and a thread needs the scales of four only. sums_of_x: times `offset`.
    """
    none = gl.zeros(SHAPE, gl.float32, MMA)
    above = ()
    if KIND == "q5_k" or KIND == "q6_k":
        above = _words_above(unit[2], KIND, _own_words(SHAPE[0], 1))
    column = last(X, 8)
    a = sums_of_x[0]
    b = sums_of_x[1] if KIND == "q6_k" else none
    for j in gl.static_range(8):
        first, second = _weights(unit, above, j, KIND, W)
        if KIND == "q6_k":
            low_x = in_column(own[j // 4], column, 2 * j % 8)
            high_x = in_column(own[j // 4], column, (2 * j + 1) % 8)
            if j < 4:
                a = mma_v2(second, high_x, mma_v2(first, low_x, a))
            else:
                b = mma_v2(second, high_x, mma_v2(first, low_x, b))
        elif KIND == "q8_0":
            if j % 2 == 0:
                a = mma_v2(first, in_column(own[0], column, j // 2), a)
            else:
                b = mma_v2(first, in_column(own[1], column, j // 2), b)
        else:
            a = mma_v2(first, in_column(own[j % 2], column, j // 2 * 2), a)
            b = mma_v2(second, in_column(own[j % 2], column, j // 2 * 2 + 1), b)
    parts = _scale_words(unit, KIND, S)
    group = last(MMA, 8)
    if KIND == "q8_0":
        words = gl.where(group % 4 < 2, parts[0][:, :, None], parts[1][:, :, None])
        total += (a + b) * gl.where(group % 2 == 0, float16_of(words, 0), float16_of(words, 1))
    elif KIND == "q6_k":
        by_group = a * signed_byte(gl.where(group < 4, parts[0][:, :, None], parts[1][:, :, None]), group % 4)
        by_group += b * signed_byte(gl.where(group < 4, parts[2][:, :, None], parts[3][:, :, None]), group % 4)
        total += by_group * unit[4].to(gl.float32)[:, :, None]
    else:
        p, s, q, t = six_bit_words(parts[1], parts[2], parts[3])
        scale = gl.where(group < 4, p[:, :, None], s[:, :, None])
        least = gl.where(group < 4, q[:, :, None], t[:, :, None])
        total += (a + b) * byte_times(scale, group % 4, float16_of(parts[0], 0)[:, :, None])
        total += sums_of_x[0] * byte_times(least, group % 4, (float16_of(parts[0], 1) * 0.0078125)[:, :, None])
    return total


@gluon.jit
def _load_own(x, norm_weight, at, WARPS: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, CHANNELS: gl.constexpr,
              NORM: gl.constexpr, X: gl.constexpr):  # fmt: skip
    """One token's x of each warp's unit, the first one from `at` on: column i has the first sixteen channels of group
    i, and the other tensor the other ones; of q6_k, whose groups are sixteen channels, group i, and group i + 8.
    """
    PIECE: gl.constexpr = _piece_of_x(WARPS, 8)
    SIZE: gl.constexpr = 16 if KIND == "q6_k" else 32
    NEXT: gl.constexpr = 128 if KIND == "q6_k" else 16
    group = last(PIECE, 8)
    channels = at + warps(PIECE, WARPS) * CHANNELS + group * SIZE + middle(PIECE, 16)
    inside = channels < K
    if KIND == "q8_0":
        inside = inside & (group < 4)
    first = gl.load(x + channels, mask=inside, other=0.0)
    second = gl.load(x + channels + NEXT, mask=inside, other=0.0)
    if NORM:
        first = first * gl.load(norm_weight + channels, mask=inside, other=0.0)
        second = second * gl.load(norm_weight + channels + NEXT, mask=inside, other=0.0)
    return gl.convert_layout(first, X), gl.convert_layout(second, X)


@gluon.jit
def _sums_of_own(own, SHAPE: gl.constexpr, MMA: gl.constexpr, W: gl.constexpr, KIND: gl.constexpr):
    """The sums of each group's x times `offset`; of q6_k those of groups 0 to 7, and of 8 to 15."""
    none = gl.zeros(SHAPE, gl.float32, MMA)
    if KIND == "q8_0":
        return none, none
    else:
        ones = gl.full([SHAPE[0], ROWS, 16], offset(KIND), gl.bfloat16, W)
        first = mma_v2(ones, own[0], none)
        if KIND == "q6_k":
            return first, mma_v2(ones, own[1], none)
        else:
            return mma_v2(ones, own[1], first), none


@gluon.jit
def _load_x(
    x, norm_weight, token, stride_x, step,
    SHAPE: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, CHANNELS: gl.constexpr, ALONE: gl.constexpr,
    NORM: gl.constexpr, MMA: gl.constexpr, W: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """The x of a step's units, one for each warp: `_load_own` and its sums if ALONE, else `_load_piece` of each."""
    WARPS: gl.constexpr = SHAPE[0]
    at = step * WARPS * CHANNELS
    if ALONE:
        own = _load_own(x, norm_weight, at, WARPS, K, KIND, CHANNELS, NORM, X)
        return own, _sums_of_own(own, SHAPE, MMA, W, KIND)
    else:
        pieces = ()
        for i in gl.static_range(CHANNELS // 16):
            pieces = pieces + (
                _load_piece(x, norm_weight, token, stride_x, at + i * 16, WARPS, SHAPE[2], K, CHANNELS, NORM, X),
            )
        return pieces, pieces


@gluon.jit
def _multiply(
    total, unit, x,
    SHAPE: gl.constexpr, ALONE: gl.constexpr, MMA: gl.constexpr, W: gl.constexpr, X: gl.constexpr, S: gl.constexpr,
    KIND: gl.constexpr,
):  # fmt: skip
    """total + the products of a step's units and x."""
    if ALONE:
        return _add_unit_of_one(total, unit, x[0], x[1], SHAPE, MMA, W, X, S, KIND)
    else:
        return _add_unit(total, unit, x[0], SHAPE, MMA, W, S, KIND)


@gluon.jit(do_not_specialize=["num_tokens"])
def _few_blocks_kernel(
    x, low, high, scale, factor, bias, norm_weight, residual, out, eps, num_tokens, stride_x, stride_out,
    N: gl.constexpr, U: gl.constexpr, M: gl.constexpr, KIND: gl.constexpr, CHANNELS: gl.constexpr, WARPS: gl.constexpr,
    ALONE: gl.constexpr, KEEP_X: gl.constexpr, NORM: gl.constexpr, SWIGLU: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and N rows of blocks, or 2N with SWIGLU: gate rows, then up rows.

    A program takes one tile of sixteen rows after another. The warps divide the units of the channels among
    themselves; where these do not come out even, x is zero. Weights are the rows of the tensor core's tile and tokens
    its columns. Rows beyond the tokens or the weight repeat the last one, and are not stored. KEEP_X: x stays in
    registers, where each warp has one unit. ALONE: there is one token.
    """
    K: gl.constexpr = U * CHANNELS
    HALVES: gl.constexpr = 2 if SWIGLU else 1
    STEPS: gl.constexpr = (U + WARPS - 1) // WARPS
    TILES: gl.constexpr = (N + 15) // 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    PIECE: gl.constexpr = _piece_of_x(WARPS, M)
    S: gl.constexpr = gl.SliceLayout(2, MMA)
    SHAPE: gl.constexpr = [WARPS, 16, M]
    SUM: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 32 // M, M], [1, WARPS, 1], [2, 1, 0])
    ROWS_OF_SUM: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SUM))
    TOKENS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, SUM))
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    if PDL:
        launch_dependents()
    token = gl.minimum(last(PIECE, M), num_tokens - 1)
    rows_of_sum = gl.arange(0, 16, layout=ROWS_OF_SUM)[:, None]
    m = gl.arange(0, M, layout=TOKENS)[None, :]
    ahead = _load_unit(low, high, scale, factor, program * 16, N - 1, 0, N * HALVES, U, KIND, WARPS, S)
    if PDL:
        wait_for_inputs()
    kept = ()
    if KEEP_X:
        for step in gl.static_range(STEPS):
            kept = kept + (
                _load_x(x, norm_weight, token, stride_x, step, SHAPE, K, KIND, CHANNELS, ALONE, NORM, MMA, W, X),
            )
    if NORM:
        norm = inverse_rms(x, eps, num_tokens, stride_x, K, M, WARPS, TOKENS)[None, :]
    total_smem = gl.allocate_shared_memory(gl.float32, SHAPE, SHARED)
    if SWIGLU:
        up_smem = gl.allocate_shared_memory(gl.float32, SHAPE, SHARED)
    for tile in range(program, TILES, num_programs):
        following = gl.minimum(tile + num_programs, TILES - 1)
        n = tile * 16 + rows_of_sum
        row = gl.minimum(n, N - 1)
        at_out = m * stride_out + n
        mask = (m < num_tokens) & (n < N)
        if BIAS:
            b = gl.load(bias + row).to(gl.float32)
            if SWIGLU:
                b_up = gl.load(bias + N + row).to(gl.float32)
        if RESIDUAL:
            before = gl.load(residual + at_out, mask=mask, other=0.0)
        for half in gl.static_range(HALVES):
            here = tile * 16 + half * N
            after = following * 16 if half == HALVES - 1 else tile * 16 + N
            last_after = N * (1 if half == HALVES - 1 else 2) - 1
            total = gl.zeros(SHAPE, gl.float32, MMA)
            if KEEP_X:
                for step in gl.static_range(STEPS):
                    unit = ahead
                    if step + 1 < STEPS:
                        ahead = _load_unit(
                            low, high, scale, factor, here, (half + 1) * N - 1, (step + 1) * WARPS,
                            N * HALVES, U, KIND, WARPS, S,
                        )  # fmt: skip
                    else:
                        ahead = _load_unit(
                            low, high, scale, factor, after, last_after, 0, N * HALVES, U, KIND, WARPS, S
                        )
                    total = _multiply(total, unit, kept[step], SHAPE, ALONE, MMA, W, X, S, KIND)
            else:
                for step in range(STEPS):
                    unit = ahead
                    more = step + 1 < STEPS
                    ahead = _load_unit(
                        low, high, scale, factor, gl.where(more, here, after),
                        gl.where(more, (half + 1) * N - 1, last_after), gl.where(more, (step + 1) * WARPS, 0),
                        N * HALVES, U, KIND, WARPS, S,
                    )  # fmt: skip
                    loaded = _load_x(
                        x, norm_weight, token, stride_x, step, SHAPE, K, KIND, CHANNELS, ALONE, NORM, MMA, W, X
                    )
                    total = _multiply(total, unit, loaded, SHAPE, ALONE, MMA, W, X, S, KIND)
            if half == 1:
                up_smem.store(total)
            else:
                total_smem.store(total)
        result = gl.sum(total_smem.load(SUM), 0)
        if SWIGLU:
            up = gl.sum(up_smem.load(SUM), 0)
        if ALONE:
            result = gl.sum(result, 1)[:, None]
            if SWIGLU:
                up = gl.sum(up, 1)[:, None]
        if NORM:
            result = result * norm
            if SWIGLU:
                up = up * norm
        if BIAS:
            result += b
            if SWIGLU:
                up += b_up
        if SWIGLU:
            result = activate(result, "silu") * up
        if RESIDUAL:
            result = result + before.to(gl.float32)
        gl.store(out + at_out, result.to(out.dtype.element_ty), mask=mask)


class Config(NamedTuple):
    """See `_few_blocks_kernel`. The warps of a multiprocessor are sixteen."""

    warps: int
    keep_x: bool


@functools.cache
def _choose(units: int, num_tokens: int) -> Config:
    """Return the number of warps with which fewest idle; with one token, whose x needs few registers, rather eight.
    Then two programs share a multiprocessor, and one multiplies while the other adds up its tile.
    """
    counts, kept = ((8, 16, 4), 2) if num_tokens == 1 else ((16, 8, 4), 1 if num_tokens <= 8 else 0)
    warps = min(counts, key=lambda count: cdiv(units, count) * count)
    return Config(warps, cdiv(units, warps) <= kept)


def config(x: Tensor, rows: BlockRows) -> Config | None:
    """Return how to compute x [M, K], M <= 16, times the rows; None where `launch` cannot."""
    if x.dtype == torch.bfloat16 and x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0 and has_tensor_cores(x.device):
        return _choose(rows.low.shape[1], len(x))
    return None


def launch(
    x: Tensor,
    rows: BlockRows,
    bias: Tensor | None,
    out: Tensor,
    config: Config,
    fusion: Fusion,
) -> None:
    """Compute x [M, K] -> out [M, N], 1 <= M <= 16, plus `residual`, of the strides of `out`."""
    norm_weight, eps, gate, residual, _ = fusion
    num_tokens, n = out.shape
    assert x.stride(1) == out.stride(1) == 1
    assert gate in (None, "silu")
    assert fusion.num_outputs(len(rows)) == n
    low, scale = rows.low.view(torch.int32), rows.scale.view(torch.int32)
    num_programs = min(cdiv(n, 16), 16 // config.warps * num_multiprocessors(x.device))
    _few_blocks_kernel[(num_programs,)](
        x, low, low if rows.high is None else rows.high.view(torch.int32), scale,
        scale if rows.factor is None else rows.factor, x if bias is None else bias,
        x if norm_weight is None else norm_weight, out if residual is None else residual, out, eps, num_tokens,
        x.stride(0), out.stride(0), N=n, U=rows.low.shape[1], M=max(next_power_of_2(num_tokens), 8), KIND=rows.kind,
        CHANNELS=unit_channels(rows.kind), WARPS=config.warps, ALONE=num_tokens == 1, KEEP_X=config.keep_x,
        NORM=norm_weight is not None, SWIGLU=gate is not None, BIAS=bias is not None, RESIDUAL=residual is not None,
        num_warps=config.warps, maxnreg=128, **pdl_options(x.device),
    )  # fmt: skip
