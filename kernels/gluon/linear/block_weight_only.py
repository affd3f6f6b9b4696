"""GEMMs of tens to hundreds of tokens with GGUF's blocks on Hopper's tensor cores, in Gluon.

Copies, sums and stores are those of `kernels.gluon.linear.weight_only`. A pair of steps is a unit of
`kernels.data.block_weight`: with each, a thread loads the scales of its two rows, and their codes' high bits.
"""


# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_init, warpgroup_mma_wait

from kernels.data.block_weight import BlockRows, unit_channels
from kernels.gluon.common.block_bits import decode_word_scaled, eight_bit_scales, float16_of, six_bit_scales, twice
from kernels.gluon.common.layouts import box_descriptor
from kernels.gluon.common.weight_only import _layout, _operand, half_words, words_of_halves
from kernels.gluon.linear.weight_only import (
    BAND,
    Config,
    _add_step,
    _allocate,
    _bring,
    _first,
    _own_rows,
    _stages,
    _store,
)
from kernels.gluon.linear.weight_only import config as config_of_bytes
from kernels.gpu.device import is_hopper
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.gpu.parts import sum_parts


@triton.jit
def _order_units_kernel(
    x, norm_weight, out, eps, stride_x,
    U: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, K]: x [tokens, K], or its norm, in the order of the tensor core's operands. One program for a row.

    First all channels of the low halves of bytes, then of the high ones: [unit, word, pair of e, t, e mod 2].
    """
    CHANNELS: tl.constexpr = 128 if KIND == "q8_0" else 256
    K: tl.constexpr = U * CHANNELS
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < K
    half = place // (U * 128)
    at = place % (U * 128)
    j = at % 128 // 16
    if KIND == "q8_0":
        piece = j
    elif KIND == "q6_k":
        piece = 2 * j + half
    else:
        piece = j // 2 * 4 + 2 * half + j % 2
    channel = at // 128 * CHANNELS + piece * 16 + at % 8 // 2 * 4 + at % 16 // 8 * 2 + at % 2
    if NORM:
        g = tl.load(norm_weight + channel, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        launch_dependents()
        wait_for_inputs()
    values = tl.load(x + token * stride_x + channel, mask=inside, other=0.0)
    if NORM:
        wide = values.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide) / K + eps)
        values = (wide.to(x.dtype.element_ty).to(tl.float32) * g).to(x.dtype.element_ty)
    tl.store(out + token * K + place, values, mask=inside)


def in_order(x: Tensor, rows: BlockRows, norm_weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x [M, K], or its norm → [M, K], as `launch` takes it."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_2(x.shape[1])
    assert x.stride(1) == 1
    _order_units_kernel[(len(x),)](
        x, x if norm_weight is None else norm_weight, out, eps, x.stride(0), U=rows.low.shape[1], KIND=rows.kind,
        NORM=norm_weight is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **pdl_options(x.device),
    )  # fmt: skip
    return out


@gluon.constexpr_function
def _of_rows(count):
    """Layout of words [64, count]: each of a row's four threads has all of them."""
    registers = [[0, 1 << i] for i in range(count.bit_length() - 1)] + [[8, 0]]
    return gl.DistributedLinearLayout(
        registers, [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, count]
    )


@gluon.constexpr_function
def _of_quarters(count):
    """Layout of words [64, 4 · count]: each of a row's four threads has `count` of them."""
    registers = [[0, 1 << i] for i in range(count.bit_length() - 1)] + [[8, 0]]
    return gl.DistributedLinearLayout(
        registers, [[0, count], [0, 2 * count], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4 * count]
    )


@gluon.jit
def _own_row(LAYOUT: gl.constexpr, upper, lower, N: gl.constexpr, STORED: gl.constexpr):
    """The rows [64, 1] of a warpgroup: of each sixteen eight upper and eight lower ones."""
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    below = at // 8 % 2
    rows = gl.minimum(upper + below * (lower - upper) + at // 16 * 8 + at % 8, N - 1) + below * STORED
    return rows[:, None]


@gluon.jit
def _load_unit(
    high, scale, factor, unit, upper, lower,
    N: gl.constexpr, U: gl.constexpr, KIND: gl.constexpr, SWIGLU: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """A unit's words of scales, high bits and factors."""
    STORED: gl.constexpr = N if SWIGLU else 0
    ALL: gl.constexpr = 2 * N if SWIGLU else N
    NUM: gl.constexpr = 2 if KIND == "q8_0" else 4
    SCALES: gl.constexpr = _of_rows(NUM)
    unit = gl.minimum(unit, U - 1)
    rows = _own_row(SCALES, upper, lower, N, STORED)
    word = gl.arange(0, NUM, layout=gl.SliceLayout(0, SCALES))[None, :]
    scales = gl.load(scale + (unit * ALL + rows) * NUM + word)
    above = scales
    factors = scales
    if KIND == "q5_k" or KIND == "q6_k":
        COUNT: gl.constexpr = 2 if KIND == "q5_k" else 4
        HIGH: gl.constexpr = _of_quarters(COUNT)
        of_high = _own_row(HIGH, upper, lower, N, STORED).to(gl.int64) * U + unit
        above = gl.load(high + of_high * (4 * COUNT) + gl.arange(0, 4 * COUNT, layout=gl.SliceLayout(0, HIGH))[None, :])
    if KIND == "q6_k":
        ROW: gl.constexpr = gl.SliceLayout(2, CUT)
        factors = gl.load(factor + unit * ALL + _own_row(ROW, upper, lower, N, STORED))
    return scales, above, factors


@gluon.jit
def _four(x, R: gl.constexpr):
    """[64, 4] → four tensors [64] in layout R."""
    even, odd = gl.split(x.reshape([64, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return gl.convert_layout(a, R), gl.convert_layout(b, R), gl.convert_layout(c, R), gl.convert_layout(d, R)


@gluon.jit
def _scales(unit, H: gl.constexpr, KIND: gl.constexpr, CUT: gl.constexpr):
    """Return what step H of a unit scales its words with, [64, 1, 4] packed, see `twice`: the low codes, the high ones;
    then the minima of both, negative.
    """
    R: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, CUT))
    if KIND == "q8_0":
        a, b = gl.split(unit[0])
        word = gl.convert_layout(b if H == 1 else a, R)
        own = _by_word(float16_of(word, 0), float16_of(word, 0), float16_of(word, 1), float16_of(word, 1), CUT)
        return own, own, own, own
    else:
        a, b, c, d = _four(unit[0], R)
        if KIND == "q6_k":
            factor = gl.convert_layout(unit[2].to(gl.float32).reshape([64]), R)
            found = eight_bit_scales(a, b, c, d, factor)
            low = _by_word(found[8 * H], found[8 * H + 2], found[8 * H + 4], found[8 * H + 6], CUT)
            high = _by_word(found[8 * H + 1], found[8 * H + 3], found[8 * H + 5], found[8 * H + 7], CUT)
            return low, high, low, high
        else:
            found = six_bit_scales(a, b, c, d)
            AT: gl.constexpr = 4 * H
            low = _by_word(found[AT], found[AT], found[AT + 2], found[AT + 2], CUT)
            high = _by_word(found[AT + 1], found[AT + 1], found[AT + 3], found[AT + 3], CUT)
            less = found[8 + AT] * -128.0
            more = found[8 + AT + 2] * -128.0
            low_least = _by_word(less, less, more, more, CUT)
            less = found[8 + AT + 1] * -128.0
            more = found[8 + AT + 3] * -128.0
            return low, high, low_least, _by_word(less, less, more, more, CUT)


@gluon.jit
def _by_word(a, b, c, d, CUT: gl.constexpr):
    """Numbers [64] of a thread's four words → [64, 1, 4] packed."""
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, CUT)))[None, None, :]
    first = gl.where(word == 0, twice(a)[:, None, None], twice(b)[:, None, None])
    second = gl.where(word == 2, twice(c)[:, None, None], twice(d)[:, None, None])
    return gl.where(word < 2, first, second)


@gluon.jit
def _bits_above(unit, H: gl.constexpr, KIND: gl.constexpr, CUT: gl.constexpr):
    """The bits above of step H's words [64, 4, 4], from the lowest on."""
    QUARTERS: gl.constexpr = gl.SliceLayout(2, CUT)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, CUT)))[None, None, :]
    if KIND == "q5_k":
        first, second = gl.split(unit[1].reshape([64, 4, 2]))
        return gl.convert_layout(second if H == 1 else first, QUARTERS)[:, :, None] >> 4 * word
    else:
        even, odd = gl.split(unit[1].reshape([64, 4, 2, 2]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        first = gl.convert_layout(c if H == 1 else a, QUARTERS)[:, :, None]
        second = gl.convert_layout(d if H == 1 else b, QUARTERS)[:, :, None]
        return gl.where(word < 2, first, second) >> 8 * (word % 2)


@gluon.jit
def _weights(words, unit, H: gl.constexpr, KIND: gl.constexpr, CUT: gl.constexpr, CODES: gl.constexpr,
             A: gl.constexpr):  # fmt: skip
    """The weights of step H of a unit as operands: of the low (or only) codes, and of the high ones."""
    cut = gl.convert_layout(words.reshape([64, 4, 4]), CUT)
    above = cut
    if KIND == "q5_k" or KIND == "q6_k":
        above = _bits_above(unit, H, KIND, CUT)
    low, high = decode_word_scaled(cut, above, _scales(unit, H, KIND, CUT), KIND, CODES)
    return _operand(low, A), _operand(high, A)


@gluon.jit
def _multiply(
    high, scale, factor, bias, residual, out, x_smem, more_smem, codes_smem, full, empty, token, num_tokens, n, first,
    steps,
    WG: gl.constexpr, N: gl.constexpr, U: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, SWIGLU: gl.constexpr, BLOCK_M: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's rows, a unit at a time. See `_block_weight_only_kernel`."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    CUT: gl.constexpr = _layout([64, 4, 4])
    CODES: gl.constexpr = _layout([64, 4, 4, 2, 2])
    HALF: gl.constexpr = half_words()
    upper = n + WG * (32 if SWIGLU else 64)
    lower = upper if SWIGLU else upper + 32
    unit = _load_unit(high, scale, factor, first // 2, upper, lower, N, U, KIND, SWIGLU, CUT)
    acc = gl.zeros([64, BLOCK_M], gl.float32, ACC)
    if MORE:
        more = gl.zeros([64, MORE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 16]))
    mbarrier.wait(full.index(0), 0)
    words = words_of_halves(codes_smem, WG * 2, HALF)
    low, above = _weights(words, unit, 0, KIND, CUT, CODES, A)
    for pair in range(steps // 2):
        step = pair * 2
        stage = step % STAGES
        sums = warpgroup_mma_init(acc)
        more_sums = warpgroup_mma_init(more) if MORE else sums
        sums, more_sums = _add_step(low, above, x_smem, more_smem, stage, sums, more_sums, HALVES, MORE)
        # Registers that the tensor core still reads must not be written: these are others.
        next_unit = _load_unit(high, scale, factor, (first + step) // 2 + 1, upper, lower, N, U, KIND, SWIGLU, CUT)
        second = (step + 1) % STAGES
        mbarrier.wait(full.index(second), ((step + 1) // STAGES) & 1)
        words = words_of_halves(codes_smem, second * 4 + WG * 2, HALF)
        second_low, second_high = _weights(words, unit, 1, KIND, CUT, CODES, A)
        sums, more_sums = _add_step(second_low, second_high, x_smem, more_smem, second, sums, more_sums, HALVES, MORE)
        following = gl.minimum(step + 2, steps - 1)
        mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
        words = words_of_halves(codes_smem, following % STAGES * 4 + WG * 2, HALF)
        low, above, words = warpgroup_mma_wait(HALVES * (2 if MORE else 1), deps=[low, above, words])
        mbarrier.arrive(empty.index(stage))
        low, above = _weights(words, next_unit, 0, KIND, CUT, CODES, A)
        unit = next_unit
        # What comes before a branch stays there: so codes are decoded before the next wait and not after it.
        mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
        acc, low, above, _, _ = warpgroup_mma_wait(0, deps=[sums, low, above, second_low, second_high])
        if MORE:
            more = warpgroup_mma_wait(0, deps=[more_sums])
        mbarrier.arrive(empty.index(second))

    _store(
        acc, bias, bias, bias, residual, out, upper, lower, token, num_tokens,
        N, KIND, True, 1, False, BIAS, RESIDUAL, SWIGLU,
    )  # fmt: skip
    if MORE:
        _store(
            more, bias, bias, bias, residual, out, upper, lower, token + BLOCK_M, num_tokens,
            N, KIND, True, 1, False, BIAS, RESIDUAL, SWIGLU,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "part_steps"])
def _block_weight_only_kernel(
    x_desc, more_desc, codes_desc, high, scale, factor, bias, residual, out, num_tokens, part_steps,
    N: gl.constexpr, U: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, SWIGLU: gl.constexpr, BLOCK_M: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] in order and N rows of blocks, or 2N with SWIGLU: gate, then up; plus `residual` with
    RESIDUAL. See `_dense_quantized_kernel`.
    """
    x_smem, more_smem, codes_smem, full, empty = _allocate(codes_desc, HALVES, BLOCK_M, MORE, STAGES)
    OWN: gl.constexpr = codes_desc.block_shape[0] * (2 if SWIGLU else 4)  # rows of out
    token, n = _first(num_tokens, N, OWN, BLOCK_M + MORE, BAND)
    part = gl.program_id(1)
    first = part * part_steps
    all_steps = part_steps * 0 + 2 * U
    steps = gl.minimum(all_steps - first, part_steps)
    out += part.to(gl.int64) * num_tokens * N
    if PDL:
        launch_dependents()
    gl.warp_specialize(
        [
            (_multiply, (
                high, scale, factor, bias, residual, out, x_smem, more_smem, codes_smem, full, empty, token, num_tokens,
                n, first, steps,
                gl.constexpr(0), N, U, KIND, HALVES, BIAS, RESIDUAL, SWIGLU, BLOCK_M, MORE, STAGES,
            )),
            (_multiply, (
                high, scale, factor, bias, residual, out, x_smem, more_smem, codes_smem, full, empty, token, num_tokens,
                n, first, steps,
                gl.constexpr(1), N, U, KIND, HALVES, BIAS, RESIDUAL, SWIGLU, BLOCK_M, MORE, STAGES,
            )),
            (_bring, (
                x_desc, more_desc, codes_desc, x_smem, more_smem, codes_smem, full, empty, token, n, first, steps,
                all_steps, N, HALVES, MORE, STAGES, SWIGLU, PDL,
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


def supports(x: Tensor) -> bool:
    """Return whether `launch` multiplies x [M, K]."""
    return x.dtype == torch.bfloat16 and is_hopper(x.device)


def config(num_tokens: int, rows: BlockRows, swiglu: bool) -> Config:
    """Return tiles, of one program for each multiprocessor."""
    n, units = rows.low.shape[:2]
    halves = unit_channels(rows.kind) // 128
    found = config_of_bytes(num_tokens, n // (2 if swiglu else 1), units * 128, halves, swiglu)
    return found._replace(programs=1, stages=_stages(found.block_m, halves))


def launch(
    x: Tensor,
    rows: BlockRows,
    bias: Tensor | None,
    out: Tensor,
    config: Config,
    *,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> None:
    """x [M, K], of `in_order` → out [M, N], plus `residual`, which lies in memory as out does; see `config`."""
    num_tokens, n = out.shape
    units, halves = rows.low.shape[1], unit_channels(rows.kind) // 128
    part = cdiv(units, config.parts)
    parts = cdiv(units, part)  # none is empty
    split = parts > 1
    assert x.is_contiguous()
    assert out.is_contiguous()
    assert not (split and swiglu)
    sums = x.new_empty(parts, num_tokens, n) if split else out
    own = _own_rows(swiglu)
    grid = (cdiv(num_tokens, config.block_m) * cdiv(n, own), parts)
    more = config.block_m % 128 if config.block_m > 128 else 0  # a tile of other than 2^i tokens is computed as two
    block_m = config.block_m - more
    x_boxes = box_descriptor(x, block_m, 64)
    scale = rows.scale.view(torch.int32)
    _block_weight_only_kernel[grid](
        x_boxes, box_descriptor(x, more, 64) if more else x_boxes,
        box_descriptor(rows.low.view(torch.int32).flatten(1), own // (2 if swiglu else 4), 16),
        scale if rows.high is None else rows.high.view(torch.int32), scale,
        scale if rows.factor is None else rows.factor, out if bias is None else bias,
        out if residual is None else residual, sums, num_tokens, 2 * part, N=n, U=units, KIND=rows.kind, HALVES=halves,
        BIAS=bias is not None and not split, RESIDUAL=residual is not None and not split, SWIGLU=swiglu,
        BLOCK_M=block_m, MORE=more, STAGES=config.stages, BAND=BAND, REGISTERS=240, num_warps=4,
        **pdl_options(x.device),
    )  # fmt: skip
    if split:
        sum_parts(sums, out, bias=bias, residual=residual)
