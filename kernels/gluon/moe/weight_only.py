"""Low-bit experts on Hopper's tensor cores, in Gluon; see `kernels.gluon.common.weight_only`.

A program multiplies 128 rows of an expert's weight, 64 in each of two warpgroups, by up to BLOCK_M of its routed
tokens, which lie side by side in memory. While the tensor core multiplies one half of a step's codes, or a step where
they have one, the warpgroup decodes what comes then, into registers of their own. A third warp asks for codes and x,
stages ahead.
"""


# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from kernels.data.moe import Tiles
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.gluon.common.activation import activate_gated
from kernels.gluon.common.code_bits import decode_half_scaled, decode_words_in_order, packed_scale, packed_zero
from kernels.gluon.common.layouts import box_descriptor
from kernels.gluon.common.weight_only import (
    _layout,
    _operand,
    _scaled,
    channel_of,
    half_sums,
    half_words,
    halves_of_sums,
    place_of,
    width,
    words_of_halves,
)
from kernels.gpu.device import is_hopper
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs


@triton.jit
def _gather_kernel(
    x, order, out, inner, stride_x,
    BYTES: tl.constexpr, HALVES: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
    NEXT_BYTES: tl.constexpr, NEXT_HALVES: tl.constexpr, PADDING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [routed token in order, width]: a routed token's token in order, with zeros where there is no channel.

    `inner` gets such zeros, too, for a weight of rows of NEXT_BYTES. PADDING: a power of two, at least as many as a row
    of it has.
    """
    WIDTH: tl.constexpr = (BYTES + 63) // 64 * 64 * HALVES
    position = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half, channel = channel_of(place, BYTES)
    if PDL:
        launch_dependents()
        wait_for_inputs()
    pair = tl.load(order + position).to(tl.int64)
    there = (place < WIDTH) & (channel < BYTES)
    values = tl.load(x + pair // CHOSEN * stride_x + half * BYTES + channel, mask=there, other=0.0)
    tl.store(out + position * WIDTH + place, values, mask=place < WIDTH)
    if PADDING > 0:
        NEXT_WIDTH: tl.constexpr = (NEXT_BYTES + 63) // 64 * 64
        each: tl.constexpr = NEXT_WIDTH - NEXT_BYTES
        i = tl.arange(0, PADDING)
        place = i // each * NEXT_WIDTH + place_of(NEXT_BYTES + i % each, NEXT_WIDTH)
        at = inner + position * (NEXT_HALVES * NEXT_WIDTH) + place
        tl.store(at, tl.zeros([PADDING], inner.dtype.element_ty), mask=i < NEXT_HALVES * each)


def gather(
    x: Tensor, order: Tensor, chosen: int, weight: QuantizedWeight, following: QuantizedWeight
) -> tuple[Tensor, Tensor]:
    """x [tokens, K] → routed tokens in order [routed tokens, width], as `launch` takes them, and where it writes those
    for `following`.
    """
    out = torch.empty(len(order), width(weight), dtype=x.dtype, device=x.device)
    inner = torch.empty(len(order), width(following), dtype=x.dtype, device=x.device)
    block = min(next_power_of_2(out.shape[1]), 4096)
    row, next_row = weight.codes.shape[-1], following.codes.shape[-1]
    padding = inner.shape[1] - following.num_channels
    _gather_kernel[(len(order), cdiv(out.shape[1], block))](
        x, order, out, inner, x.stride(0), BYTES=row, HALVES=weight.num_channels // row, CHOSEN=chosen, BLOCK=block,
        NEXT_BYTES=next_row, NEXT_HALVES=following.num_channels // next_row,
        PADDING=next_power_of_2(padding) if padding else 0, num_warps=min(max(block // 512, 1), 4),
        **pdl_options(x.device),
    )  # fmt: skip
    return out, inner


@gluon.jit
def _bring(
    x_desc, codes_desc, scale, x_smem, codes_smem, full, empty, pair, row, n,
    N: gl.constexpr, STEPS: gl.constexpr, BYTES: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Ask for each step's codes and channels of x once its stage is empty. EARLY: codes may be asked for before x is
    there.
    """
    NUM_BYTES: gl.constexpr = 2 * PIECES * codes_desc.block_type.nbytes + HALVES * x_desc.block_type.nbytes
    AHEAD: gl.constexpr = min(STAGES, STEPS) if EARLY else 0
    for step in gl.static_range(AHEAD):
        mbarrier.expect(full.index(step), NUM_BYTES)
        _ask_codes(codes_desc, codes_smem, full, step, row, step, N, PIECES)
        _prefetch_scales(scale, n, step, N, BYTES, GROUP, GROUPS, HALVES, PIECES)
    if EARLY:
        wait_for_inputs()
    for step in range(STEPS):
        stage = step % STAGES
        if step >= AHEAD:
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), NUM_BYTES)
            _ask_codes(codes_desc, codes_smem, full, stage, row, step, N, PIECES)
            _prefetch_scales(scale, n, step, N, BYTES, GROUP, GROUPS, HALVES, PIECES)
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                x_desc, [pair, (half * STEPS + step) * 64], full.index(stage), x_smem.index(stage * HALVES + half)
            )


@gluon.jit
def _prefetch_scales(
    scale, n, step, N: gl.constexpr, BYTES: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    HALVES: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Bring a step's scales of the program's 128 rows, where they lie by groups, to the L2 cache: threads ask for them
    late.

    The loads of a thread share few scoreboards: it cannot have scales of several steps on their way.
    """
    EACH: gl.constexpr = (64 + GROUP - 1) // GROUP  # groups of a half
    SECTOR: gl.constexpr = 32 * 8 // scale.dtype.element_ty.primitive_bitwidth  # scales that memory moves at once
    SECTORS: gl.constexpr = 128 // PIECES // SECTOR
    COUNT: gl.constexpr = HALVES * EACH * PIECES * SECTORS
    if GROUPS > 1:
        i = gl.arange(0, max(COUNT, 32), layout=gl.BlockedLayout([max(COUNT, 32) // 32], [32], [1], [0]))
        i = gl.minimum(i, COUNT - 1)
        half = i // (EACH * PIECES * SECTORS)
        group = (half * BYTES + step * 64) // GROUP + i // (PIECES * SECTORS) % EACH
        row = i // SECTORS % PIECES * N + gl.minimum(n + i % SECTORS * SECTOR, N - 1)
        at = (scale + gl.minimum(group, GROUPS - 1) * (N * PIECES) + row).to(gl.int64, bitcast=True)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _rows(n, N: gl.constexpr, PIECES: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's 64 rows of a warpgroup: from n on, or of each sixteen eight gate rows and their up rows.

    Those that do not exist are the last.
    """
    i = gl.arange(0, 64, layout=LAYOUT)
    if PIECES == 2:
        rows = gl.minimum(n + i // 16 * 8 + i % 8, N - 1) + i // 8 % 2 * N
    else:
        rows = gl.minimum(n + i, N - 1)
    return rows


@gluon.jit
def _words(codes_smem, stage, WG: gl.constexpr, PIECES: gl.constexpr):
    """A step's codes of a warpgroup's rows; see `_rows`."""
    if PIECES == 2:
        words = words_of_halves(codes_smem, stage * 4 + WG * 2, half_words())
    else:
        words = codes_smem.index(stage * 2 + WG).load(_layout([64, 16]))
    return words


@gluon.jit
def _ask_codes(codes_desc, codes_smem, full, stage, row, step, N: gl.constexpr, PIECES: gl.constexpr):
    """A step's codes of the rows of the first warpgroup, then of the second: with two pieces gate rows, then up
    rows.
    """
    ROWS: gl.constexpr = codes_desc.block_shape[0]
    for i in gl.static_range(2 * PIECES):
        tma.async_copy_global_to_shared(
            codes_desc, [row + i % PIECES * N + i // PIECES * ROWS, step * 16], full.index(stage),
            codes_smem.index(stage * 2 * PIECES + i),
        )  # fmt: skip


@gluon.jit
def _multiply(
    scale, zero, factor, bias, weights, order, out, x_smem, codes_smem, full, empty, first, stop, n,
    WG: gl.constexpr, N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    HALVES: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    NEXT_BYTES: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's rows; pointers to what belongs to the weight are the expert's. See
    `_quantized_experts_kernel`.
    """
    GATED: gl.constexpr = ACTIVATION != ""
    BYTES: gl.constexpr = K // HALVES
    STEPS: gl.constexpr = (BYTES + 63) // 64
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    GROUPED: gl.constexpr = GROUPS > 1 or ZERO
    PIECES: gl.constexpr = 2 if GATED else 1
    OWN: gl.constexpr = 64 // PIECES  # rows of out
    STORED: gl.constexpr = PIECES * N
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    CUT: gl.constexpr = _layout([64, 4, 4])
    OUT: gl.constexpr = half_sums(BLOCK_M) if GATED else ACC
    n = n + WG * OWN
    of_rows = _rows(n, N, PIECES, gl.SliceLayout(1, gl.SliceLayout(2, CUT)))[:, None]
    pointers = scale + of_rows // ROWS * (1 if ROWS == 1 else GROUPS)
    zeros = zero + of_rows
    high0 = _ask_scales(pointers, zeros, 0, HALVES - 1, STORED, BYTES, GROUP, GROUPS, ROWS, ZERO)
    high1 = _ask_scales(pointers, zeros, 1, HALVES - 1, STORED, BYTES, GROUP, GROUPS, ROWS, ZERO)
    low0 = _ask_scales(pointers, zeros, 0, 0, STORED, BYTES, GROUP, GROUPS, ROWS, ZERO)
    low1 = _ask_scales(pointers, zeros, 1, 0, STORED, BYTES, GROUP, GROUPS, ROWS, ZERO)
    low2 = _ask_scales(pointers, zeros, 2, 0, STORED, BYTES, GROUP, GROUPS, ROWS, ZERO)
    acc = gl.zeros([64, BLOCK_M], gl.float32, ACC)
    mbarrier.wait(full.index(0), 0)
    words = _words(codes_smem, 0, WG, PIECES)
    low = _half(words, low0, 0, KIND, GROUPED, ZERO, A)
    if STEPS % 2:
        acc, low, words, high2, low3 = _step(
            acc, low, words, high0, low1, pointers, zeros, x_smem, codes_smem, full, empty, 0,
            WG, PIECES, STEPS, STORED, BYTES, KIND, GROUP, GROUPS, ROWS, HALVES, ZERO, STAGES, A,
        )  # fmt: skip
        high0 = high1
        high1 = high2
        low1 = low2
        low2 = low3
    # Unrolled by two: each load is consumed two steps later, in the same registers.
    for turn in range(STEPS // 2):
        step = STEPS % 2 + 2 * turn
        acc, low, words, high0, low1 = _step(
            acc, low, words, high0, low1, pointers, zeros, x_smem, codes_smem, full, empty, step,
            WG, PIECES, STEPS, STORED, BYTES, KIND, GROUP, GROUPS, ROWS, HALVES, ZERO, STAGES, A,
        )  # fmt: skip
        acc, low, words, high1, low2 = _step(
            acc, low, words, high1, low2, pointers, zeros, x_smem, codes_smem, full, empty, step + 1,
            WG, PIECES, STEPS, STORED, BYTES, KIND, GROUP, GROUPS, ROWS, HALVES, ZERO, STAGES, A,
        )  # fmt: skip
    acc = _scaled(
        acc, scale, factor, bias, _rows(n, N, PIECES, gl.SliceLayout(1, ACC)), ROWS, GROUPED, FACTOR, BIAS, KIND,
    )  # fmt: skip
    position = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    outputs = n + gl.arange(0, OWN, layout=gl.SliceLayout(1, OUT))
    if GATED:
        gate, up = halves_of_sums(acc, OUT)
        result = activate_gated(gate, up, ACTIVATION)
        NEXT_WIDTH: gl.constexpr = (NEXT_BYTES + 63) // 64 * 64 * (N // NEXT_BYTES)
        at = position.to(gl.int64)[None, :] * NEXT_WIDTH + place_of(outputs, NEXT_BYTES)[:, None]
    else:
        pair = gl.load(order + gl.minimum(position, stop - 1))
        result = acc * gl.load(weights + pair)[None, :]
        at = pair.to(gl.int64)[None, :] * N + outputs[:, None]
    mask = (outputs < N)[:, None] & (position < stop)[None, :]
    gl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _step(
    acc, low, words, scales, next_scales, pointers, zeros, x_smem, codes_smem, full, empty, step,
    WG: gl.constexpr, PIECES: gl.constexpr, STEPS: gl.constexpr, STORED: gl.constexpr, BYTES: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    ZERO: gl.constexpr, STAGES: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """acc + a step's products: `low` are its weights of the low (or only) codes, `words` its codes, `scales` the high
    ones'.

    Also the next step's `low`, of `next_scales`, and words; then the high scales of two and the low ones of three steps
    on.
    """
    GROUPED: gl.constexpr = GROUPS > 1 or ZERO
    stage = step % STAGES
    sums = warpgroup_mma(low, x_smem.index(stage * HALVES).permute((1, 0)), warpgroup_mma_init(acc), is_async=True)
    following = gl.minimum(step + 1, STEPS - 1)
    mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
    next_words = _words(codes_smem, following % STAGES, WG, PIECES)
    # Registers that the tensor core still reads must not be written: these are others.
    high = low
    if HALVES == 2:
        high = _half(words, scales, 1, KIND, GROUPED, ZERO, A)
        sums = warpgroup_mma(high, x_smem.index(stage * HALVES + 1).permute((1, 0)), sums, is_async=True)
        scales = _ask_scales(pointers, zeros, step + 2, 1, STORED, BYTES, GROUP, GROUPS, ROWS, ZERO)
        low, next_words = warpgroup_mma_wait(1, deps=[low, next_words])
    next_low = _half(next_words, next_scales, 0, KIND, GROUPED, ZERO, A)
    next_scales = _ask_scales(pointers, zeros, step + 3, 0, STORED, BYTES, GROUP, GROUPS, ROWS, ZERO)
    # What comes before a branch stays there: so codes are decoded before the next wait and not after it.
    mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
    acc, next_low, _ = warpgroup_mma_wait(0, deps=[sums, next_low, high])
    mbarrier.arrive(empty.index(stage))
    return acc, next_low, next_words, scales, next_scales


@gluon.jit
def _ask_scales(
    pointers, zeros, step, HALF: gl.constexpr, STORED: gl.constexpr, BYTES: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, ROWS: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """Scales and zero points [rows, 4] of the groups of each quarter of a step's channels; beyond the last group, its
    own.

    They come straight from memory, where the rows of a group lie side by side: see `by_groups`.
    """
    scales = ()
    if GROUPS > 1 or ZERO:
        quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _layout([64, 4, 4]))))[None, :]
        group = gl.minimum((HALF * BYTES + step * 64 + quarter * 16) // GROUP, GROUPS - 1)
        scales = (gl.load(pointers + group * (STORED if ROWS == 1 else 1)),)
        if ZERO:
            scales = scales + (gl.load(zeros + group * STORED),)
    return scales


@gluon.jit
def _half(
    words, scales, HALF: gl.constexpr, KIND: gl.constexpr, GROUPED: gl.constexpr, ZERO: gl.constexpr, A: gl.constexpr
):
    """A step's weights as the operand of the tensor core, of the low (or only) codes, or with HALF of the high ones."""
    CUT: gl.constexpr = _layout([64, 4, 4])
    CODES: gl.constexpr = _layout([64, 4, 4, 2, 2])
    if GROUPED:
        FRACTIONS: gl.constexpr = scales[1].dtype != gl.int8 if ZERO else False
        zero = packed_zero(scales[1], KIND) if ZERO else words
        scale = packed_scale(scales[0], KIND)
        values = decode_half_scaled(words, zero, scale, HALF, KIND, ZERO, FRACTIONS, CUT, CODES)
    else:
        values = decode_words_in_order(words, KIND, CUT, CODES)[HALF]
    return _operand(values, A)


@gluon.jit
def _tile(
    x_desc, codes_desc, scale, zero, factor, bias, weights, order, out, x_smem, codes_smem, full, empty,
    expert, first, stop, n,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, NEXT_BYTES: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M routed tokens; pointers to what belongs to the weight are the expert's. See
    `_quantized_experts_kernel`.
    """
    GATED: gl.constexpr = ACTIVATION != ""
    PIECES: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = K // HALVES
    STEPS: gl.constexpr = (BYTES + 63) // 64
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP if ROWS == 1 else 1  # of scales that lie by groups
    gl.warp_specialize(
        [
            (_multiply, (
                scale, zero, factor, bias, weights, order, out, x_smem, codes_smem, full, empty, first, stop, n,
                gl.constexpr(0), N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, ACTIVATION, NEXT_BYTES, BLOCK_M,
                STAGES,
            )),
            (_multiply, (
                scale, zero, factor, bias, weights, order, out, x_smem, codes_smem, full, empty, first, stop, n,
                gl.constexpr(1), N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, ACTIVATION, NEXT_BYTES, BLOCK_M,
                STAGES,
            )),
            (_bring, (
                x_desc, codes_desc, scale, x_smem, codes_smem, full, empty, first, expert * (PIECES * N) + n, n,
                N, STEPS, BYTES, GROUP, GROUPS, HALVES, STAGES, PIECES, gl.constexpr(PDL and not GATED),
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def _quantized_experts_kernel(
    x_desc, small_x_desc, codes_desc, scale, zero, factor, bias, weights, order, entries, out,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    NEXT_BYTES: gl.constexpr, BLOCK_M: gl.constexpr, SMALL_M: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """128 rows of one tile of routed tokens, from x [routed token in order, width]; `entries` are of
    `kernels.triton.pairs`.

    At most SMALL_M routed tokens, unless it is 0, are computed as such a tile. With ACTIVATION: that of gate and up,
    out [routed token in order, width] for a weight of rows of NEXT_BYTES; the weight has 2N rows. Else out [routed
    token, N], times the routed token's routing weight; then codes are asked for while the kernel before still runs.
    """
    GATED: gl.constexpr = ACTIVATION != ""
    PIECES: gl.constexpr = 2 if GATED else 1
    STORED: gl.constexpr = PIECES * N
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    OWN: gl.constexpr = 128 // PIECES  # rows of out
    X_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    CODES_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
    entry = entries + gl.program_id(0) // ((N + OWN - 1) // OWN) * 3
    n = gl.program_id(0) % ((N + OWN - 1) // OWN) * OWN
    if PDL and GATED:  # in this order: the next kernel reads the entries before it waits
        wait_for_inputs()
        launch_dependents()
    elif PDL:
        launch_dependents()
    expert = gl.load(entry)
    first = gl.load(entry + 1)
    stop = gl.load(entry + 2)
    if expert >= 0:
        x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, BLOCK_M, 64], X_TILE)
        codes_smem = gl.allocate_shared_memory(gl.int32, [STAGES * 2 * PIECES, 64 // PIECES, 16], CODES_TILE)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        fence_async_shared()
        scale += expert * ((STORED + ROWS - 1) // ROWS * GROUPS)
        zero += expert * (STORED * GROUPS)
        factor += expert * STORED
        bias += expert * STORED
        if SMALL_M == 0:
            _tile(
                x_desc, codes_desc, scale, zero, factor, bias, weights, order, out, x_smem, codes_smem, full, empty,
                expert, first, stop, n, N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, ACTIVATION, NEXT_BYTES,
                BLOCK_M, STAGES, REGISTERS, PDL,
            )  # fmt: skip
        elif stop - first <= SMALL_M:
            small_smem = x_smem._reinterpret(gl.bfloat16, [STAGES * HALVES * 2, SMALL_M, 64], X_TILE)
            _tile(
                small_x_desc, codes_desc, scale, zero, factor, bias, weights, order, out, small_smem, codes_smem, full,
                empty, expert, first, stop, n, N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, ACTIVATION,
                NEXT_BYTES, SMALL_M, STAGES, REGISTERS, PDL,
            )  # fmt: skip
        else:
            _tile(
                x_desc, codes_desc, scale, zero, factor, bias, weights, order, out, x_smem, codes_smem, full, empty,
                expert, first, stop, n, N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, ACTIVATION, NEXT_BYTES,
                BLOCK_M, STAGES, REGISTERS, PDL,
            )  # fmt: skip


SHARED_BYTES = 224_000  # of a multiprocessor
MIN_DIVIDED = 32  # routed tokens of a tile from which on one that is at most half full has code of its own


def supports(x: Tensor, weight: Weight) -> bool:
    """Return whether `launch` computes tokens like x times the experts' weight."""
    return (
        isinstance(weight, QuantizedWeight)
        and weight.order is None
        and x.dtype == torch.bfloat16
        and weight.codes.shape[2] % 16 == 0
        and (weight.scale.shape[-1] == 1 or weight.group % 16 == 0)
        and is_hopper(x.device)
    )


class Config(NamedTuple):
    """Stages and registers; see `_quantized_experts_kernel`. max_registers: of a thread at the start; None: all."""

    stages: int
    registers: int
    max_registers: int | None


def _config(block_m: int, halves: int) -> Config:
    step = 128 * 64 + halves * block_m * 128
    if block_m <= 64:  # two programs on a multiprocessor
        return Config(min(SHARED_BYTES // 2 // step, 8), 104, 80)
    return Config(min(SHARED_BYTES // step, 8), 240, None)


def launch(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    weights: Tensor,
    tiles: Tiles,
    out: Tensor,
    activation: str = "",
    following: QuantizedWeight | None = None,
) -> None:
    """x: routed tokens in order [routed tokens, width]; out: with an activation, those for the weight `following`; see
    `_quantized_experts_kernel`.
    """
    n, block_m = weight.codes.shape[1] // (2 if activation else 1), tiles.block_m
    row, k = weight.codes.shape[2], weight.num_channels
    pieces = 2 if activation else 1
    config = _config(block_m, k // row)
    small_m = block_m // 2 if block_m >= MIN_DIVIDED else 0
    codes = weight.codes.flatten(0, 1).view(torch.int32)
    scale = weight.scale.view(torch.uint8) if weight.scale.dtype == torch.float8_e4m3fn else weight.scale
    assert x.is_contiguous()
    assert codes.is_contiguous()
    assert weight.lies_by_groups()
    _quantized_experts_kernel[(len(tiles.entries) * cdiv(n, 128 // pieces),)](
        box_descriptor(x, block_m, 64), box_descriptor(x, small_m or block_m, 64),
        box_descriptor(codes, 64 // pieces, 16), scale, scale if weight.zero is None else weight.zero,
        scale if weight.factor is None else weight.factor, out if bias is None else bias, weights, *tiles[:2], out,
        N=n, K=k, KIND=weight.kind, GROUP=weight.group, ROWS=weight.rows, HALVES=k // row, ZERO=weight.zero is not None,
        FACTOR=weight.factor is not None, BIAS=bias is not None, ACTIVATION=activation,
        NEXT_BYTES=n if following is None else following.codes.shape[2], BLOCK_M=block_m, SMALL_M=small_m,
        STAGES=config.stages, REGISTERS=config.registers, num_warps=4, maxnreg=config.max_registers,
        **pdl_options(x.device),
    )  # fmt: skip
