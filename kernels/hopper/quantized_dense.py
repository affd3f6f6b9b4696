"""Products of tens to hundreds of tokens with matrices of few bits on Hopper's matrix unit, for tall tiles, in Gluon.

A program multiplies 256 rows of the weight by up to 128 tokens, or 128 rows by 256 tokens. Each of two warpgroups has half
of the rows: upper and lower ones, or with SwiGLU gate rows and up rows. In tall tiles the matrix unit multiplies the upper
rows of a step, then the lower ones; in wide ones all rows of a step, then of the next. While it multiplies, the warpgroup
decodes what comes then, into registers of their own. A third warp asks for codes and x, STAGES steps ahead.
What a thread takes of a step, and the order of x that follows from it, are those of `kernels.hopper.quantized_steps`.
"""


# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

import functools
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

from kernels.hopper.quantized_steps import (
    _boxes,
    _finished,
    _layout,
    _load_scales,
    _weights,
    channel_of,
    half_sums,
    half_words,
    halves_of_sums,
    width,
    words_of_halves,
)
from kernels.hopper.quantized_tiles import MAX_TOKENS, _is_hopper
from kernels.quantized_weight import QuantizedWeight
from kernels.triton.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.triton.parts import sum_parts

TALL = 128  # tokens of a tall tile at most; a wide one has 256


@triton.jit
def _order_kernel(
    x, norm_weight, out, eps, stride_x,
    BYTES: tl.constexpr, HALVES: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, width]: x [tokens, K], or its norm, in order, with zeros where there is no channel.

    A program writes BLOCK numbers of a row: all of them with NORM.
    """
    WIDTH: tl.constexpr = (BYTES + 63) // 64 * 64 * HALVES
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half, channel = channel_of(place, BYTES)
    there = (place < WIDTH) & (channel < BYTES)
    if NORM:
        g = tl.load(norm_weight + half * BYTES + channel, mask=there, other=0.0).to(tl.float32)
    if PDL:
        launch_dependents()
        wait_for_inputs()
    values = tl.load(x + token * stride_x + half * BYTES + channel, mask=there, other=0.0)
    if NORM:
        wide = values.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide) / (BYTES * HALVES) + eps)
        values = (wide.to(x.dtype.element_ty).to(tl.float32) * g).to(x.dtype.element_ty)
    tl.store(out + token * WIDTH + place, values, mask=place < WIDTH)


def in_order(x: Tensor, weight: QuantizedWeight, norm_weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x [M, K], or its norm → [M, width], as `launch` takes it."""
    out = torch.empty(len(x), width(weight), dtype=x.dtype, device=x.device)
    block = next_power_of_2(out.shape[1])
    block = block if norm_weight is not None else min(block, 2048)
    row = weight.codes.shape[1]
    assert x.stride(1) == 1
    _order_kernel[(len(x), cdiv(out.shape[1], block))](
        x, x if norm_weight is None else norm_weight, out, eps, x.stride(0), BYTES=row, HALVES=weight.num_channels // row,
        NORM=norm_weight is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **pdl_options(x.device),
    )  # fmt: skip
    return out


@gluon.jit
def _bring(
    x_desc, codes_desc, x_smem, codes_smem, full, empty, token, row, first, steps,
    N: gl.constexpr, STEPS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, SWIGLU: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Ask for each step's codes and channels of x once its stage is empty; the first codes before x is there."""
    NUM_BYTES: gl.constexpr = 4 * codes_desc.block_type.nbytes + HALVES * x_desc.block_type.nbytes
    ROWS: gl.constexpr = codes_desc.block_shape[0]  # the upper ones of a warpgroup
    BY_GROUP: gl.constexpr = ROWS if SWIGLU else 2 * ROWS
    BELOW: gl.constexpr = N if SWIGLU else ROWS
    for step in gl.static_range(STAGES):
        if step < steps:
            mbarrier.expect(full.index(step), NUM_BYTES)
            for i in gl.static_range(4):
                tma.async_copy_global_to_shared(
                    codes_desc, [row + i // 2 * BY_GROUP + i % 2 * BELOW, (first + step) * 16], full.index(step),
                    codes_smem.index(step * 4 + i),
                )  # fmt: skip
    if PDL:
        wait_for_inputs()
    for step in range(steps):
        stage = step % STAGES
        if step >= STAGES:
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), NUM_BYTES)
            for i in gl.static_range(4):
                tma.async_copy_global_to_shared(
                    codes_desc, [row + i // 2 * BY_GROUP + i % 2 * BELOW, (first + step) * 16], full.index(stage),
                    codes_smem.index(stage * 4 + i),
                )  # fmt: skip
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                x_desc, [token, (half * STEPS + first + step) * 64], full.index(stage),
                x_smem.index(stage * HALVES + half),
            )  # fmt: skip


@gluon.jit
def _multiply_tall(
    scale, zero, factor, bias, residual, out, x_smem, codes_smem, full, empty, token, num_tokens, n, first, steps,
    WG: gl.constexpr, N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    HALVES: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    SWIGLU: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's rows of a tall tile. See `_dense_quantized_kernel`."""
    BYTES: gl.constexpr = K // HALVES
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    GROUPED: gl.constexpr = GROUPS > 1 or ZERO
    FAR: gl.constexpr = BLOCK_M <= 64  # scales are asked for two steps ahead, where there are registers for it
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    WORDS: gl.constexpr = _layout([64, 16])
    CUT: gl.constexpr = _layout([64, 4, 4])
    CODES: gl.constexpr = _layout([64, 4, 4, 2, 2])
    LAYOUT: gl.constexpr = gl.SliceLayout(2, CUT)  # of scales
    upper = n + WG * (64 if SWIGLU else 128)
    lower = upper if SWIGLU else upper + 64
    STORED: gl.constexpr = N if SWIGLU else 0  # rows before the lower ones
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    upper_rows = gl.minimum(upper + i, N - 1)[:, None]
    lower_rows = STORED + gl.minimum(lower + i, N - 1)[:, None]
    if GROUPED:
        upper_scale = scale + upper_rows // ROWS * GROUPS
        lower_scale = scale + lower_rows // ROWS * GROUPS
        upper_zero = zero + upper_rows * GROUPS
        lower_zero = zero + lower_rows * GROUPS
        us, uz = _load_scales(upper_scale, upper_zero, first, BYTES, GROUP, GROUPS, HALVES, ZERO, CUT)
        ls, lz = _load_scales(lower_scale, lower_zero, first, BYTES, GROUP, GROUPS, HALVES, ZERO, CUT)
        next_us = us
        next_uz = uz
        if FAR:
            next_us, next_uz = _load_scales(upper_scale, upper_zero, first + 1, BYTES, GROUP, GROUPS, HALVES, ZERO, CUT)
    else:
        us = ()
        uz = ()
        ls = ()
        lz = ()
    top = gl.zeros([64, BLOCK_M], gl.float32, ACC)
    bottom = gl.zeros([64, BLOCK_M], gl.float32, ACC)
    mbarrier.wait(full.index(0), 0)
    low, high = _weights(
        codes_smem.index(WG * 2).load(WORDS), us, uz, KIND, GROUPED, ZERO, HALVES, CUT, CODES, A
    )  # fmt: skip
    for step in range(steps):
        stage = step % STAGES
        x_low = x_smem.index(stage * HALVES).permute((1, 0))
        x_high = x_smem.index(stage * HALVES + HALVES - 1).permute((1, 0))
        upper_sums = warpgroup_mma(low, x_low, warpgroup_mma_init(top), is_async=True)
        if HALVES == 2:
            upper_sums = warpgroup_mma(high, x_high, upper_sums, is_async=True)
        # Registers that the matrix unit still reads must not be written: these are others.
        if GROUPED:
            us = next_us
            uz = next_uz
            if FAR:
                next_us, next_uz = _load_scales(
                    upper_scale, upper_zero, first + step + 2, BYTES, GROUP, GROUPS, HALVES, ZERO, CUT
                )
            else:
                us, uz = _load_scales(
                    upper_scale, upper_zero, first + step + 1, BYTES, GROUP, GROUPS, HALVES, ZERO, CUT
                )
        words = codes_smem.index(stage * 4 + WG * 2 + 1).load(WORDS)
        low_below, high_below = _weights(words, ls, lz, KIND, GROUPED, ZERO, HALVES, CUT, CODES, A)
        lower_sums = warpgroup_mma(low_below, x_low, warpgroup_mma_init(bottom), is_async=True)
        if HALVES == 2:
            lower_sums = warpgroup_mma(high_below, x_high, lower_sums, is_async=True)
        if GROUPED:
            ls, lz = _load_scales(lower_scale, lower_zero, first + step + 1, BYTES, GROUP, GROUPS, HALVES, ZERO, CUT)
        following = gl.minimum(step + 1, steps - 1)
        mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
        words = codes_smem.index(following % STAGES * 4 + WG * 2).load(WORDS)
        low, high, words = warpgroup_mma_wait(HALVES, deps=[low, high, words])
        low, high = _weights(words, us, uz, KIND, GROUPED, ZERO, HALVES, CUT, CODES, A)
        # What comes before a branch stays there: so codes are decoded before the next wait and not after it.
        mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
        top, bottom, low, high, _, _ = warpgroup_mma_wait(
            0, deps=[upper_sums, lower_sums, low, high, low_below, high_below]
        )
        mbarrier.arrive(empty.index(stage))

    top = _finished(top, scale, factor, bias, upper, 0, N, ROWS, GROUPED, FACTOR, BIAS, ACC, KIND)
    bottom = _finished(bottom, scale, factor, bias, lower, STORED, N, ROWS, GROUPED, FACTOR, BIAS, ACC, KIND)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    if SWIGLU:
        _store(top / (1.0 + gl.exp(-top)) * bottom, residual, out, upper, token, num_tokens, N, BLOCK_M, RESIDUAL, OUT)
    else:
        _store(top, residual, out, upper, token, num_tokens, N, BLOCK_M, RESIDUAL, OUT)
        _store(bottom, residual, out, lower, token, num_tokens, N, BLOCK_M, RESIDUAL, OUT)


@gluon.jit
def _multiply_wide(
    scale, zero, factor, bias, residual, out, x_smem, codes_smem, full, empty, token, num_tokens, n, first, steps,
    WG: gl.constexpr, N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    HALVES: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    SWIGLU: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's rows of a wide tile, two steps at a time: their number is even. See `_dense_quantized_kernel`."""
    BYTES: gl.constexpr = K // HALVES
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    GROUPED: gl.constexpr = GROUPS > 1 or ZERO
    SHARED: gl.constexpr = GROUP % 128 == 0 and (BYTES % 128 == 0 or HALVES == 1)  # by both steps
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    CUT: gl.constexpr = _layout([64, 4, 4])
    CODES: gl.constexpr = _layout([64, 4, 4, 2, 2])
    HALF: gl.constexpr = half_words()
    OUT: gl.constexpr = half_sums(BLOCK_M)
    LAYOUT: gl.constexpr = gl.SliceLayout(2, CUT)  # of scales
    upper = n + WG * (32 if SWIGLU else 64)
    lower = upper if SWIGLU else upper + 32
    STORED: gl.constexpr = N if SWIGLU else 0  # rows before the lower ones
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    below = at // 8 % 2
    rows = gl.minimum(upper + below * (lower - upper) + at // 16 * 8 + at % 8, N - 1) + below * STORED
    s = ()
    z = ()
    if GROUPED:
        scales = scale + rows[:, None] // ROWS * GROUPS
        zeros = zero + rows[:, None] * GROUPS
        s, z = _load_scales(scales, zeros, first, BYTES, GROUP, GROUPS, HALVES, ZERO, CUT)
    acc = gl.zeros([64, BLOCK_M], gl.float32, ACC)
    mbarrier.wait(full.index(0), 0)
    words = words_of_halves(codes_smem, WG * 2, HALF)
    low, high = _weights(words, s, z, KIND, GROUPED, ZERO, HALVES, CUT, CODES, A)
    if GROUPED and not SHARED:
        s, z = _load_scales(scales, zeros, first + 1, BYTES, GROUP, GROUPS, HALVES, ZERO, CUT)
    for pair in range(steps // 2):
        step = pair * 2
        stage = step % STAGES
        sums = warpgroup_mma(low, x_smem.index(stage * HALVES).permute((1, 0)), warpgroup_mma_init(acc), is_async=True)
        if HALVES == 2:
            sums = warpgroup_mma(high, x_smem.index(stage * HALVES + 1).permute((1, 0)), sums, is_async=True)
        # Registers that the matrix unit still reads must not be written: these are others.
        next_s = s
        next_z = z
        if GROUPED:
            next_s, next_z = _load_scales(scales, zeros, first + step + 2, BYTES, GROUP, GROUPS, HALVES, ZERO, CUT)
        second = (step + 1) % STAGES
        mbarrier.wait(full.index(second), ((step + 1) // STAGES) & 1)
        words = words_of_halves(codes_smem, second * 4 + WG * 2, HALF)
        second_low, second_high = _weights(words, s, z, KIND, GROUPED, ZERO, HALVES, CUT, CODES, A)
        sums = warpgroup_mma(second_low, x_smem.index(second * HALVES).permute((1, 0)), sums, is_async=True)
        if HALVES == 2:
            sums = warpgroup_mma(second_high, x_smem.index(second * HALVES + 1).permute((1, 0)), sums, is_async=True)
        if GROUPED and not SHARED:
            s, z = _load_scales(scales, zeros, first + step + 3, BYTES, GROUP, GROUPS, HALVES, ZERO, CUT)
        following = gl.minimum(step + 2, steps - 1)
        mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
        words = words_of_halves(codes_smem, following % STAGES * 4 + WG * 2, HALF)
        low, high, words = warpgroup_mma_wait(HALVES, deps=[low, high, words])
        mbarrier.arrive(empty.index(stage))
        low, high = _weights(words, next_s, next_z, KIND, GROUPED, ZERO, HALVES, CUT, CODES, A)
        if GROUPED and SHARED:
            s = next_s
            z = next_z
        # What comes before a branch stays there: so codes are decoded before the next wait and not after it.
        mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
        acc, low, high, _, _ = warpgroup_mma_wait(0, deps=[sums, low, high, second_low, second_high])
        mbarrier.arrive(empty.index(second))

    top, bottom = halves_of_sums(acc, OUT)
    top = _finished(top, scale, factor, bias, upper, 0, N, ROWS, GROUPED, FACTOR, BIAS, OUT, KIND)
    bottom = _finished(bottom, scale, factor, bias, lower, STORED, N, ROWS, GROUPED, FACTOR, BIAS, OUT, KIND)
    if SWIGLU:
        _store(top / (1.0 + gl.exp(-top)) * bottom, residual, out, upper, token, num_tokens, N, BLOCK_M, RESIDUAL, OUT)
    else:
        _store(top, residual, out, upper, token, num_tokens, N, BLOCK_M, RESIDUAL, OUT)
        _store(bottom, residual, out, lower, token, num_tokens, N, BLOCK_M, RESIDUAL, OUT)


@gluon.jit
def _multiply(
    scale, zero, factor, bias, residual, out, x_smem, codes_smem, full, empty, token, num_tokens, n, first, steps,
    WG: gl.constexpr, N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    HALVES: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    SWIGLU: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's rows. See `_dense_quantized_kernel`."""
    if BLOCK_M <= 128:
        _multiply_tall(
            scale, zero, factor, bias, residual, out, x_smem, codes_smem, full, empty, token, num_tokens, n, first, steps,
            WG, N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, RESIDUAL, SWIGLU, BLOCK_M, STAGES,
        )  # fmt: skip
    else:
        _multiply_wide(
            scale, zero, factor, bias, residual, out, x_smem, codes_smem, full, empty, token, num_tokens, n, first, steps,
            WG, N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, RESIDUAL, SWIGLU, BLOCK_M, STAGES,
        )  # fmt: skip


@gluon.jit
def _store(
    result, residual, out, n, token, num_tokens,
    N: gl.constexpr, BLOCK_M: gl.constexpr, RESIDUAL: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Rows from n on of BLOCK_M tokens, plus `residual` with RESIDUAL."""
    rows = n + gl.arange(0, result.shape[0], layout=gl.SliceLayout(1, OUT))[:, None]
    m = token + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))[None, :]
    at = m.to(gl.int64) * N + rows
    mask = (m < num_tokens) & (rows < N)
    result = gl.convert_layout(result, OUT)
    if RESIDUAL:
        result += gl.load(residual + at, mask=mask, other=0.0).to(gl.float32)
    gl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["num_tokens"])
def _dense_quantized_kernel(
    x_desc, codes_desc, scale, zero, factor, bias, residual, out, num_tokens,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, SWIGLU: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, BAND: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, width] and codes of N rows, or of 2N with SWIGLU: gate, then up; plus `residual` with RESIDUAL.

    Each program takes PART steps of the channels; if these are not all, out is [parts, M, N] float32, the sums of each part.
    BAND tiles of tokens are multiplied by all rows before the next ones, so that their x is still in L2.
    """
    STEPS: gl.constexpr = (K // HALVES + 63) // 64
    ROWS_OF_CODES: gl.constexpr = codes_desc.block_shape[0]
    OWN: gl.constexpr = 2 * ROWS_OF_CODES if SWIGLU else 4 * ROWS_OF_CODES  # rows of out
    X_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    CODES_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, BLOCK_M, 64], X_TILE)
    codes_smem = gl.allocate_shared_memory(gl.int32, [STAGES * 4, ROWS_OF_CODES, 16], CODES_TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    num_n: gl.constexpr = (N + OWN - 1) // OWN
    first_m = gl.program_id(0) // (BAND * num_n) * BAND
    height = gl.minimum(gl.cdiv(num_tokens, BLOCK_M) - first_m, BAND)
    token = (first_m + gl.program_id(0) % (BAND * num_n) % height) * BLOCK_M
    n = gl.program_id(0) % (BAND * num_n) // height * OWN
    part = gl.program_id(1)
    first = part * PART
    steps = gl.minimum(STEPS - first, PART)
    out += part.to(gl.int64) * num_tokens * N
    if PDL:
        launch_dependents()
    gl.warp_specialize(
        [
            (_multiply, (
                scale, zero, factor, bias, residual, out, x_smem, codes_smem, full, empty, token, num_tokens, n, first, steps,
                gl.constexpr(0), N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, RESIDUAL, SWIGLU, BLOCK_M, STAGES,
            )),
            (_multiply, (
                scale, zero, factor, bias, residual, out, x_smem, codes_smem, full, empty, token, num_tokens, n, first, steps,
                gl.constexpr(1), N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, RESIDUAL, SWIGLU, BLOCK_M, STAGES,
            )),
            (_bring, (
                x_desc, codes_desc, x_smem, codes_smem, full, empty, token, n, first, steps,
                N, STEPS, HALVES, STAGES, SWIGLU, PDL,
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


class Config(NamedTuple):
    """How a product is cut up; see `_dense_quantized_kernel`. max_registers: of a thread at the start; None: all."""

    block_m: int
    stages: int
    parts: int = 1
    registers: int = 240
    max_registers: int | None = None


SHARED_BYTES = 230_000  # of a multiprocessor
BAND = 2  # tiles of tokens that are multiplied side by side
MAX_SWIGLU = 2048  # tokens with SwiGLU, which cuBLAS leaves to another kernel


@functools.cache
def _choose(kind: str, num_tokens: int, n: int, row_bytes: int, halves: int, swiglu: bool) -> Config | None:
    """One program on each multiprocessor; the channels in parts where rows and tokens are too few for all of them.

    None where `kernels.hopper.quantized_tiles`, which does not know e2m1, or cuBLAS with the matrix written out, was faster.
    """
    even = cdiv(row_bytes, 64) % 2 == 0
    if num_tokens > (MAX_SWIGLU if swiglu and even else MAX_TOKENS) or (
        32 < num_tokens <= TALL and not swiglu and kind != "e2m1"
    ):
        return None
    block_m = 256 if num_tokens > TALL and even else min(max(next_power_of_2(num_tokens), 16), TALL)
    tiles = cdiv(num_tokens, block_m) * cdiv(n, _own_rows(block_m, swiglu))
    parts = 1 if swiglu else max(min(132 // tiles, 8, row_bytes // 256), 1)
    return Config(block_m, _stages(block_m, halves), parts)


def _stages(block_m: int, halves: int) -> int:
    """As many as fit into shared memory."""
    wide = block_m > TALL
    sums = 0 if wide else min(2 * 64 * block_m * 4, 33_000)  # of both warpgroups, on their way to other threads
    return min((SHARED_BYTES - sums) // (64 * (128 if wide else 256) + halves * block_m * 128), 8)


def _own_rows(block_m: int, swiglu: bool) -> int:
    """Of out, that a program writes."""
    return (256 if block_m <= TALL else 128) // (2 if swiglu else 1)


def config(x: Tensor, weight: QuantizedWeight, swiglu: bool = False) -> Config | None:
    """How to multiply x [M, K] by the weight; None where this kernel does not apply."""
    row = weight.codes.shape[1]
    if (
        x.dtype == torch.bfloat16
        and weight.order is None
        and row % 16 == 0
        and (weight.scale.shape[1] == 1 or weight.group % 16 == 0)
        and weight.scale.is_contiguous()
        and (weight.zero is None or weight.zero.is_contiguous())
        and _is_hopper(x.device)
    ):
        return _choose(
            weight.kind, len(x), len(weight) // (2 if swiglu else 1), row, weight.num_channels // row, swiglu
        )
    return None


def launch(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    config: Config,
    *,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> None:
    """x [M, width], of `in_order` → out [M, N], plus `residual`, which lies in memory as out does; see `config`."""
    num_tokens, n = out.shape
    row, k = weight.codes.shape[1], weight.num_channels
    steps = cdiv(row, 64)
    at_once = 1 if config.block_m <= TALL else 2
    part = cdiv(cdiv(steps, at_once), config.parts) * at_once
    parts = cdiv(steps, part)  # none is empty
    split = parts > 1
    assert x.is_contiguous()
    assert not (split and swiglu)
    codes = weight.codes.view(torch.int32)
    scale = weight.scale.view(torch.uint8) if weight.scale.dtype == torch.float8_e4m3fn else weight.scale
    sums = x.new_empty(parts, num_tokens, n) if split else out
    own = _own_rows(config.block_m, swiglu)
    grid = (cdiv(num_tokens, config.block_m) * cdiv(n, own), parts)
    _dense_quantized_kernel[grid](
        _boxes(x, config.block_m, 64, 128), _boxes(codes, own // (2 if swiglu else 4), 16, 64), scale,
        scale if weight.zero is None else weight.zero, scale if weight.factor is None else weight.factor,
        out if bias is None else bias, out if residual is None else residual, sums, num_tokens, N=n, K=k, KIND=weight.kind,
        GROUP=weight.group, ROWS=weight.rows, HALVES=k // row, ZERO=weight.zero is not None,
        FACTOR=weight.factor is not None, BIAS=bias is not None and not split, RESIDUAL=residual is not None and not split,
        SWIGLU=swiglu, BLOCK_M=config.block_m, STAGES=config.stages, PART=part, BAND=BAND, REGISTERS=config.registers,
        num_warps=4, maxnreg=config.max_registers, **pdl_options(x.device),
    )  # fmt: skip
    if split:
        sum_parts(sums, out, bias=bias, residual=residual)
