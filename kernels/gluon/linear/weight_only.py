"""GEMMs of tens to hundreds of tokens with low-bit weights on Hopper's tensor cores, in Gluon.

A program multiplies 128 rows of the weight by a tile of tokens. Each of two warpgroups has half of the rows: upper and
lower ones, or with SwiGLU gate rows and up rows; one thread has the sums of both. While the tensor core multiplies one
step, the warpgroup decodes the next into registers of their own. A third warp asks for codes and x, STAGES steps ahead.
What a thread takes of a step, and the order of x that follows from it, are those of `kernels.gluon.common.weight_only`.
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

from kernels.data.quantized_weight import QuantizedWeight
from kernels.gluon.common.activation import activate
from kernels.gluon.common.layouts import box_descriptor
from kernels.gluon.common.weight_only import (
    _finished,
    _layout,
    _load_scales,
    _weights,
    channel_of,
    half_sums,
    half_words,
    halves_of_sums,
    words_of_halves,
)
from kernels.gpu.device import is_hopper
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.gpu.parts import sum_parts


@triton.jit
def _order_kernel(
    x, norm_weight, out, eps, stride_x,
    BYTES: tl.constexpr, HALVES: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, width]: x [tokens, K], or its norm, in order, with zeros where there is no channel.

    A program writes BLOCK numbers of a row: all of them with NORM.
    """
    HALF: tl.constexpr = (BYTES + 127) // 128 * 128
    WIDTH: tl.constexpr = HALF * HALVES
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half, channel = channel_of(place, HALF)
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
    row = weight.codes.shape[1]
    halves = weight.num_channels // row
    out = torch.empty(len(x), halves * cdiv(row, 128) * 128, dtype=x.dtype, device=x.device)
    block = next_power_of_2(out.shape[1])
    block = block if norm_weight is not None else min(block, 2048)
    assert x.stride(1) == 1
    _order_kernel[(len(x), cdiv(out.shape[1], block))](
        x, x if norm_weight is None else norm_weight, out, eps, x.stride(0), BYTES=row, HALVES=halves,
        NORM=norm_weight is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **pdl_options(x.device),
    )  # fmt: skip
    return out


@gluon.jit
def _bring(
    x_desc, more_desc, codes_desc, x_smem, more_smem, codes_smem, full, empty, token, row, first, steps, all_steps,
    N: gl.constexpr, HALVES: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr, SWIGLU: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Ask for each step's codes and channels of x once its stage is empty; the first codes before x is there."""
    OF_X: gl.constexpr = x_desc.block_type.nbytes + (more_desc.block_type.nbytes if MORE else 0)
    NUM_BYTES: gl.constexpr = 4 * codes_desc.block_type.nbytes + HALVES * OF_X
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
            channel = (half * all_steps + first + step) * 64
            at = stage * HALVES + half
            tma.async_copy_global_to_shared(x_desc, [token, channel], full.index(stage), x_smem.index(at))
            if MORE:
                tma.async_copy_global_to_shared(
                    more_desc, [token + x_desc.block_shape[0], channel], full.index(stage), more_smem.index(at)
                )


@gluon.jit
def _multiply(
    scale, zero, factor, bias, residual, out, x_smem, more_smem, codes_smem, full, empty, token, num_tokens, n, first,
    steps, row_bytes, num_groups,
    WG: gl.constexpr, N: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, GROUPED: gl.constexpr,
    SHARED: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, SWIGLU: gl.constexpr, BLOCK_M: gl.constexpr, MORE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's rows, two steps at a time: their number is even. See `_dense_quantized_kernel`."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    CUT: gl.constexpr = _layout([64, 4, 4])
    CODES: gl.constexpr = _layout([64, 4, 4, 2, 2])
    HALF: gl.constexpr = half_words()
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
        scales = scale + rows[:, None] // ROWS * num_groups
        zeros = zero + rows[:, None] * num_groups
        s, z = _load_scales(scales, zeros, first, row_bytes, GROUP, num_groups, HALVES, ZERO, CUT)
    acc = gl.zeros([64, BLOCK_M], gl.float32, ACC)
    if MORE:
        more = gl.zeros([64, MORE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 16]))
    mbarrier.wait(full.index(0), 0)
    words = words_of_halves(codes_smem, WG * 2, HALF)
    low, high = _weights(words, s, z, KIND, GROUPED, ZERO, HALVES, CUT, CODES, A)
    if GROUPED and not SHARED:
        s, z = _load_scales(scales, zeros, first + 1, row_bytes, GROUP, num_groups, HALVES, ZERO, CUT)
    for pair in range(steps // 2):
        step = pair * 2
        stage = step % STAGES
        sums = warpgroup_mma_init(acc)
        more_sums = warpgroup_mma_init(more) if MORE else sums
        sums, more_sums = _add_step(low, high, x_smem, more_smem, stage, sums, more_sums, HALVES, MORE)
        # Registers that the tensor core still reads must not be written: these are others.
        next_s = s
        next_z = z
        if GROUPED:
            next_s, next_z = _load_scales(
                scales, zeros, first + step + 2, row_bytes, GROUP, num_groups, HALVES, ZERO, CUT
            )
        second = (step + 1) % STAGES
        mbarrier.wait(full.index(second), ((step + 1) // STAGES) & 1)
        words = words_of_halves(codes_smem, second * 4 + WG * 2, HALF)
        second_low, second_high = _weights(words, s, z, KIND, GROUPED, ZERO, HALVES, CUT, CODES, A)
        sums, more_sums = _add_step(second_low, second_high, x_smem, more_smem, second, sums, more_sums, HALVES, MORE)
        if GROUPED and not SHARED:
            s, z = _load_scales(scales, zeros, first + step + 3, row_bytes, GROUP, num_groups, HALVES, ZERO, CUT)
        following = gl.minimum(step + 2, steps - 1)
        mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
        words = words_of_halves(codes_smem, following % STAGES * 4 + WG * 2, HALF)
        low, high, words = warpgroup_mma_wait(HALVES * (2 if MORE else 1), deps=[low, high, words])
        mbarrier.arrive(empty.index(stage))
        low, high = _weights(words, next_s, next_z, KIND, GROUPED, ZERO, HALVES, CUT, CODES, A)
        if GROUPED and SHARED:
            s = next_s
            z = next_z
        # What comes before a branch stays there: so codes are decoded before the next wait and not after it.
        mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
        acc, low, high, _, _ = warpgroup_mma_wait(0, deps=[sums, low, high, second_low, second_high])
        if MORE:
            more = warpgroup_mma_wait(0, deps=[more_sums])
        mbarrier.arrive(empty.index(second))

    _store(
        acc, scale, factor, bias, residual, out, upper, lower, token, num_tokens,
        N, KIND, GROUPED, ROWS, FACTOR, BIAS, RESIDUAL, SWIGLU,
    )  # fmt: skip
    if MORE:
        _store(
            more, scale, factor, bias, residual, out, upper, lower, token + BLOCK_M, num_tokens,
            N, KIND, GROUPED, ROWS, FACTOR, BIAS, RESIDUAL, SWIGLU,
        )  # fmt: skip


@gluon.jit
def _add_step(low, high, x_smem, more_smem, stage, sums, more_sums, HALVES: gl.constexpr, MORE: gl.constexpr):
    """Begin to add a step's weights times its x: of the first tokens to `sums`, of the MORE others to `more_sums`."""
    for half in gl.static_range(HALVES):
        w = high if half == 1 else low
        at = stage * HALVES + half
        sums = warpgroup_mma(w, x_smem.index(at).permute((1, 0)), sums, is_async=True)
        if MORE:
            more_sums = warpgroup_mma(w, more_smem.index(at).permute((1, 0)), more_sums, is_async=True)
    return sums, more_sums


@gluon.jit
def _store(
    acc, scale, factor, bias, residual, out, upper, lower, token, num_tokens,
    N: gl.constexpr, KIND: gl.constexpr, GROUPED: gl.constexpr, ROWS: gl.constexpr, FACTOR: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, SWIGLU: gl.constexpr,
):  # fmt: skip
    """Sums of the upper rows and of the lower ones, with what belongs to the rows; with SWIGLU their SwiGLU."""
    STORED: gl.constexpr = N if SWIGLU else 0
    OUT: gl.constexpr = half_sums(acc.shape[1])
    top, bottom = halves_of_sums(acc, OUT)
    top = _finished(top, scale, factor, bias, upper, 0, N, ROWS, GROUPED, FACTOR, BIAS, OUT, KIND)
    bottom = _finished(bottom, scale, factor, bias, lower, STORED, N, ROWS, GROUPED, FACTOR, BIAS, OUT, KIND)
    if SWIGLU:
        result = activate(top, "silu") * bottom
        _store_rows(result, residual, out, upper, token, num_tokens, N, RESIDUAL, OUT)
    else:
        _store_rows(top, residual, out, upper, token, num_tokens, N, RESIDUAL, OUT)
        _store_rows(bottom, residual, out, lower, token, num_tokens, N, RESIDUAL, OUT)


@gluon.jit
def _store_rows(
    result, residual, out, n, token, num_tokens, N: gl.constexpr, RESIDUAL: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Rows from n on of tokens from `token` on, plus `residual` with RESIDUAL."""
    rows = n + gl.arange(0, result.shape[0], layout=gl.SliceLayout(1, OUT))[:, None]
    m = token + gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, OUT))[None, :]
    at = m.to(gl.int64) * N + rows
    mask = (m < num_tokens) & (rows < N)
    if RESIDUAL:
        result += gl.load(residual + at, mask=mask, other=0.0).to(gl.float32)
    gl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _allocate(codes_desc, HALVES: gl.constexpr, BLOCK_M: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr):
    """Allocate shared memory for all stages: x of the first tokens and of the MORE others, codes, barriers."""
    X_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    CODES_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, BLOCK_M, 64], X_TILE)
    more_smem = x_smem
    if MORE:
        more_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, MORE, 64], X_TILE)
    codes_smem = gl.allocate_shared_memory(gl.int32, [STAGES * 4, codes_desc.block_shape[0], 16], CODES_TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return x_smem, more_smem, codes_smem, full, empty


@gluon.jit
def _first(num_tokens, N: gl.constexpr, OWN: gl.constexpr, TOKENS: gl.constexpr, BAND: gl.constexpr):
    """The first token and the first of the OWN rows of `out` that this program computes."""
    num_n: gl.constexpr = (N + OWN - 1) // OWN
    first_m = gl.program_id(0) // (BAND * num_n) * BAND
    height = gl.minimum(gl.cdiv(num_tokens, TOKENS) - first_m, BAND)
    token = (first_m + gl.program_id(0) % (BAND * num_n) % height) * TOKENS
    return token, gl.program_id(0) % (BAND * num_n) // height * OWN


@gluon.jit(do_not_specialize=["num_tokens", "part_steps"])
def _dense_quantized_kernel(
    x_desc, more_desc, codes_desc, scale, zero, factor, bias, residual, out, num_tokens, num_channels, part_steps,
    N: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, GROUPED: gl.constexpr, SHARED: gl.constexpr,
    ROWS: gl.constexpr, HALVES: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, SWIGLU: gl.constexpr, BLOCK_M: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, width] and codes of N rows, or of 2N with SWIGLU: gate, then up; plus `residual` with
    RESIDUAL.

    A tile has BLOCK_M + MORE tokens. Each program takes `part_steps` steps of the channels; if these are not all, out
    is [parts, M, N], the sums of each part. BAND tiles of tokens are multiplied by all rows before the next ones, so
    that their x is still in L2. The number of channels is no constant, so that GEMMs that differ in it share a
    compiled kernel.
    """
    x_smem, more_smem, codes_smem, full, empty = _allocate(codes_desc, HALVES, BLOCK_M, MORE, STAGES)
    row_bytes = num_channels // HALVES
    num_groups = (num_channels + GROUP - 1) // GROUP
    all_steps = (row_bytes + 127) // 128 * 2
    if SHARED:
        row_bytes = row_bytes // 128 * 128  # no other number, but now the compiler knows that it is a multiple
    OWN: gl.constexpr = codes_desc.block_shape[0] * (2 if SWIGLU else 4)  # rows of out
    token, n = _first(num_tokens, N, OWN, BLOCK_M + MORE, BAND)
    part = gl.program_id(1)
    first = part * part_steps
    steps = gl.minimum(all_steps - first, part_steps)
    out += part.to(gl.int64) * num_tokens * N
    if PDL:
        launch_dependents()
    gl.warp_specialize(
        [
            (_multiply, (
                scale, zero, factor, bias, residual, out, x_smem, more_smem, codes_smem, full, empty, token, num_tokens,
                n, first, steps, row_bytes, num_groups,
                gl.constexpr(0), N, KIND, GROUP, GROUPED, SHARED, ROWS, HALVES, ZERO, FACTOR, BIAS, RESIDUAL, SWIGLU,
                BLOCK_M, MORE, STAGES,
            )),
            (_multiply, (
                scale, zero, factor, bias, residual, out, x_smem, more_smem, codes_smem, full, empty, token, num_tokens,
                n, first, steps, row_bytes, num_groups,
                gl.constexpr(1), N, KIND, GROUP, GROUPED, SHARED, ROWS, HALVES, ZERO, FACTOR, BIAS, RESIDUAL, SWIGLU,
                BLOCK_M, MORE, STAGES,
            )),
            (_bring, (
                x_desc, more_desc, codes_desc, x_smem, more_smem, codes_smem, full, empty, token, n, first, steps,
                all_steps, N, HALVES, MORE, STAGES, SWIGLU, PDL,
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


class Config(NamedTuple):
    """Tile sizes; see `_dense_quantized_kernel`. programs: on a multiprocessor, one or two."""

    block_m: int
    stages: int
    parts: int = 1
    programs: int = 1


SHARED_BYTES = 230_000  # of a multiprocessor
BAND = 2  # tiles of tokens that are multiplied side by side


@functools.cache
def config(num_tokens: int, n: int, row_bytes: int, halves: int, swiglu: bool) -> Config:
    """Return tiles for 132 multiprocessors; split-K where rows and tokens are too few for all of them."""
    if num_tokens > 128:
        block_m = min(256, 192, key=lambda height: cdiv(num_tokens, height) * height)
    else:
        block_m = max(next_power_of_2(num_tokens), 32)
    programs = 2 if swiglu and block_m <= 64 else 1
    tiles = cdiv(num_tokens, block_m) * cdiv(n, _own_rows(swiglu))
    parts = 1 if swiglu else max(min(132 // tiles, 8, row_bytes // 256), 1)
    return Config(block_m, _stages(block_m, halves, programs), parts, programs)


def _stages(block_m: int, halves: int, programs: int = 1) -> int:
    """Return the number of stages that fit into shared memory."""
    return min(SHARED_BYTES // programs // (64 * 128 + halves * block_m * 128), 8)


def _own_rows(swiglu: bool) -> int:
    """Return the number of rows of `out` that a program writes."""
    return 64 if swiglu else 128


def supports(x: Tensor, weight: QuantizedWeight) -> bool:
    """Return whether `launch` computes x [M, K] times the weight."""
    return (
        x.dtype == torch.bfloat16
        and weight.order is None
        and weight.codes.shape[1] % 16 == 0
        and (weight.scale.shape[1] == 1 or weight.group % 16 == 0)
        and weight.scale.is_contiguous()
        and (weight.zero is None or weight.zero.is_contiguous())
        and is_hopper(x.device)
    )


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
    pairs = cdiv(row, 128)  # of steps
    part = cdiv(pairs, config.parts)
    parts = cdiv(pairs, part)  # none is empty
    split = parts > 1
    assert x.is_contiguous()
    assert not (split and swiglu)
    codes = weight.codes.view(torch.int32)
    scale = weight.scale.view(torch.uint8) if weight.scale.dtype == torch.float8_e4m3fn else weight.scale
    sums = x.new_empty(parts, num_tokens, n) if split else out
    own = _own_rows(swiglu)
    grid = (cdiv(num_tokens, config.block_m) * cdiv(n, own), parts)
    more = config.block_m % 128 if config.block_m > 128 else 0  # a tile of other than 2^i tokens is computed as two
    block_m = config.block_m - more
    x_boxes = box_descriptor(x, block_m, 64)
    # Of a warpgroup's thread; and of each thread before they are divided, where two programs need room.
    registers, max_registers = (240, None) if config.programs == 1 else (104, 80)
    shared = weight.group % 128 == 0 and (row % 128 == 0 or row == k)  # scales, by both steps of a pair
    _dense_quantized_kernel[grid](
        x_boxes, box_descriptor(x, more, 64) if more else x_boxes,
        box_descriptor(codes, own // (2 if swiglu else 4), 16), scale, scale if weight.zero is None else weight.zero,
        scale if weight.factor is None else weight.factor, out if bias is None else bias,
        out if residual is None else residual, sums, num_tokens, k, 2 * part, N=n, KIND=weight.kind, GROUP=weight.group,
        GROUPED=weight.scale.shape[1] > 1 or weight.zero is not None, SHARED=shared, ROWS=weight.rows, HALVES=k // row,
        ZERO=weight.zero is not None, FACTOR=weight.factor is not None, BIAS=bias is not None and not split,
        RESIDUAL=residual is not None and not split, SWIGLU=swiglu, BLOCK_M=block_m, MORE=more, STAGES=config.stages,
        BAND=BAND, REGISTERS=registers, num_warps=4, maxnreg=max_registers, **pdl_options(x.device),
    )  # fmt: skip
    if split:
        sum_parts(sums, out, bias=bias, residual=residual)
