"""Experts of few bits on Hopper's matrix unit, in Gluon.

A program takes one tile after another: 256 rows of an expert's weight times up to BLOCK_M of its pairs, which lie side by side
in memory. `kernels.hopper.quantized_tall` says how. Codes and x of a tile are asked for while the one before is finished.
"""


# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.hopper.experts_few import _activate
from kernels.hopper.quantized_tall import _boxes, _finished, _layout, channel_of, place_of, sum_tall, width
from kernels.hopper.quantized_tiles import _is_hopper
from kernels.quantized_weight import QuantizedWeight, Weight
from kernels.triton.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs


@triton.jit
def _gather_kernel(
    x, order, out, stride_x,
    BYTES: tl.constexpr, HALVES: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [pair in order, width]: a pair's token in order, with zeros where there is no channel."""
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


def gather(x: Tensor, order: Tensor, weight: QuantizedWeight, chosen: int) -> Tensor:
    """x [tokens, K] → pairs in order [pairs, width], as `launch` takes them."""
    out = torch.empty(len(order), width(weight), dtype=x.dtype, device=x.device)
    block = min(next_power_of_2(out.shape[1]), 4096)
    row = weight.codes.shape[-1]
    _gather_kernel[(len(order), cdiv(out.shape[1], block))](
        x, order, out, x.stride(0), BYTES=row, HALVES=weight.num_channels // row, CHOSEN=chosen, BLOCK=block,
        num_warps=min(max(block // 512, 1), 4), **pdl_options(x.device),
    )  # fmt: skip
    return out


@gluon.jit
def _ask_codes(codes_desc, codes_smem, full, stage, row, step, N: gl.constexpr, GATED: gl.constexpr):
    """A step's codes of upper and lower rows of the first warpgroup, then of the second."""
    for i in gl.static_range(4):
        tma.async_copy_global_to_shared(
            codes_desc, [row + i // 2 * (64 if GATED else 128) + i % 2 * (N if GATED else 64), step * 16],
            full.index(stage), codes_smem.index(stage * 4 + i),
        )  # fmt: skip


@gluon.jit
def _bring(
    x_desc, codes_desc, x_smem, codes_smem, full, empty, entries, num_tiles, program, programs,
    N: gl.constexpr, STEPS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Ask for each step's codes and channels of x once its stage is empty. EARLY: codes may be asked for before x is there."""
    NUM_BYTES: gl.constexpr = 4 * codes_desc.block_type.nbytes + HALVES * x_desc.block_type.nbytes
    OWN: gl.constexpr = 128 if GATED else 256
    BLOCKS: gl.constexpr = (N + OWN - 1) // OWN
    STORED: gl.constexpr = 2 * N if GATED else N
    asked = 0
    if EARLY:
        expert = gl.load(entries + program // BLOCKS * 3)
        if expert >= 0:
            for step in gl.static_range(min(STAGES, STEPS)):
                mbarrier.expect(full.index(step), NUM_BYTES)
                _ask_codes(
                    codes_desc, codes_smem, full, step, expert * STORED + program % BLOCKS * OWN, step, N, GATED
                )  # fmt: skip
            asked = min(STAGES, STEPS)
        wait_for_inputs()
    before = 0
    for tile in range(program, num_tiles, programs):
        entry = entries + tile // BLOCKS * 3
        expert = gl.load(entry)
        if expert >= 0:
            pair = gl.load(entry + 1)
            row = expert * STORED + tile % BLOCKS * OWN
            for step in range(STEPS):
                now = before + step
                stage = now % STAGES
                if now >= asked:
                    mbarrier.wait(empty.index(stage), ((now // STAGES) & 1) ^ 1)
                    mbarrier.expect(full.index(stage), NUM_BYTES)
                    _ask_codes(codes_desc, codes_smem, full, stage, row, step, N, GATED)
                for half in gl.static_range(HALVES):
                    tma.async_copy_global_to_shared(
                        x_desc, [pair, (half * STEPS + step) * 64], full.index(stage),
                        x_smem.index(stage * HALVES + half),
                    )  # fmt: skip
            before += STEPS


@gluon.jit
def _multiply(
    scale, zero, factor, bias, weights, order, out, x_smem, codes_smem, full, empty, entries, num_tiles, program, programs,
    WG: gl.constexpr, N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    HALVES: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    NEXT_BYTES: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's rows of each tile. See `_quantized_experts_kernel`."""
    GATED: gl.constexpr = ACTIVATION != ""
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    GROUPED: gl.constexpr = GROUPS > 1 or ZERO
    STEPS: gl.constexpr = (K // HALVES + 63) // 64
    OWN: gl.constexpr = 128 if GATED else 256
    BLOCKS: gl.constexpr = (N + OWN - 1) // OWN
    STORED: gl.constexpr = 2 * N if GATED else N
    BELOW: gl.constexpr = N if GATED else 0  # rows before the lower ones
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    before = 0
    for tile in range(program, num_tiles, programs):
        entry = entries + tile // BLOCKS * 3
        expert = gl.load(entry)
        if expert >= 0:
            first = gl.load(entry + 1)
            stop = gl.load(entry + 2)
            own_scale = scale + expert * ((STORED + ROWS - 1) // ROWS * GROUPS)
            own_zero = zero + expert * (STORED * GROUPS)
            own_factor = factor + expert * STORED
            own_bias = bias + expert * STORED
            upper = tile % BLOCKS * OWN + WG * (OWN // 2)
            lower = upper if GATED else upper + 64
            i = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, _layout([64, 4, 4]))))
            top, bottom = sum_tall(
                own_scale, own_zero, x_smem, codes_smem, full, empty, gl.minimum(upper + i, N - 1),
                BELOW + gl.minimum(lower + i, N - 1), 0, STEPS, before, WG, K, KIND, GROUP, ROWS, HALVES, ZERO, BLOCK_M,
                STAGES, ACC,
            )  # fmt: skip
            before += STEPS
            top = _finished(top, own_scale, own_factor, own_bias, upper, 0, N, ROWS, GROUPED, FACTOR, BIAS, ACC, KIND)
            bottom = _finished(
                bottom, own_scale, own_factor, own_bias, lower, BELOW, N, ROWS, GROUPED, FACTOR, BIAS, ACC, KIND
            )  # fmt: skip
            if GATED:
                _store_in_order(
                    _activate(top, bottom, ACTIVATION), out, upper, first, stop, N, NEXT_BYTES, BLOCK_M, OUT
                )
            else:
                _store_pairs(top, weights, order, out, upper, first, stop, N, BLOCK_M, OUT)
                _store_pairs(bottom, weights, order, out, lower, first, stop, N, BLOCK_M, OUT)


@gluon.jit
def _store_in_order(
    result, out, n, first, stop, N: gl.constexpr, NEXT_BYTES: gl.constexpr, BLOCK_M: gl.constexpr, OUT: gl.constexpr
):
    """Outputs from n on of the pairs [first, stop) in order, for rows of NEXT_BYTES; outputs beyond N are the zeros there."""
    WIDTH: gl.constexpr = (NEXT_BYTES + 63) // 64 * 64
    PAD: gl.constexpr = WIDTH - NEXT_BYTES
    outputs = n + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    position = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    half = outputs // NEXT_BYTES
    channel = outputs % NEXT_BYTES
    if PAD > 0:
        half = gl.where(outputs < N, half, (outputs - N) // PAD)
        channel = gl.where(outputs < N, channel, NEXT_BYTES + (outputs - N) % PAD)
    place = half * WIDTH + place_of(channel, WIDTH)
    result = gl.where((outputs < N)[:, None], gl.convert_layout(result, OUT), 0.0)
    mask = (half < N // NEXT_BYTES)[:, None] & (position < stop)[None, :]
    at = position.to(gl.int64)[None, :] * (N // NEXT_BYTES * WIDTH) + place[:, None]
    gl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _store_pairs(
    result, weights, order, out, n, first, stop, N: gl.constexpr, BLOCK_M: gl.constexpr, OUT: gl.constexpr
):
    """Outputs from n on of the pairs [first, stop) in order, times their routing weights."""
    outputs = n + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    position = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    pair = gl.load(order + gl.minimum(position, stop - 1))
    result = gl.convert_layout(result, OUT) * gl.load(weights + pair)[None, :]
    mask = (outputs < N)[:, None] & (position < stop)[None, :]
    gl.store(out + pair.to(gl.int64)[None, :] * N + outputs[:, None], result.to(out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["num_tiles"])
def _quantized_experts_kernel(
    x_desc, codes_desc, scale, zero, factor, bias, weights, order, entries, out, num_tiles,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    NEXT_BYTES: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Tiles of pairs from x [pair in order, width]; `entries` are of `kernels.triton.moe._sort_kernel`.

    With ACTIVATION: that of gate and up, out [pair in order, width] for a weight of rows of NEXT_BYTES; the weight has 2N
    rows. Else out [pair, N], times the pair's routing weight; then codes are asked for while the kernel before still runs.
    """
    GATED: gl.constexpr = ACTIVATION != ""
    STEPS: gl.constexpr = (K // HALVES + 63) // 64
    X_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    CODES_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
    if PDL and GATED:  # in this order: the next kernel reads the entries before it waits
        wait_for_inputs()
        launch_dependents()
    elif PDL:
        launch_dependents()
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, BLOCK_M, 64], X_TILE)
    codes_smem = gl.allocate_shared_memory(gl.int32, [STAGES * 4, 64, 16], CODES_TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    gl.warp_specialize(
        [
            (_multiply, (
                scale, zero, factor, bias, weights, order, out, x_smem, codes_smem, full, empty, entries, num_tiles, program,
                programs, gl.constexpr(0), N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, ACTIVATION, NEXT_BYTES,
                BLOCK_M, STAGES,
            )),
            (_multiply, (
                scale, zero, factor, bias, weights, order, out, x_smem, codes_smem, full, empty, entries, num_tiles, program,
                programs, gl.constexpr(1), N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, ACTIVATION, NEXT_BYTES,
                BLOCK_M, STAGES,
            )),
            (_bring, (
                x_desc, codes_desc, x_smem, codes_smem, full, empty, entries, num_tiles, program, programs,
                N, STEPS, HALVES, STAGES, GATED, gl.constexpr(PDL and not GATED),
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


REGISTERS = 240  # of a thread that multiplies
SHARED_BYTES = 230_000  # of a multiprocessor


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def applies(x: Tensor, weight: Weight) -> bool:
    """Whether this kernel can multiply tokens like x by the experts' weight."""
    return (
        isinstance(weight, QuantizedWeight)
        and weight.order is None
        and x.dtype == torch.bfloat16
        and weight.codes.shape[2] % 16 == 0
        and (weight.scale.shape[-1] == 1 or weight.group % 16 == 0)
        and _is_hopper(x.device)
    )


def _stages(block_m: int, halves: int) -> int:
    """As many as fit into shared memory."""
    sums = min(2 * 64 * block_m * 4, 33_000)  # of both warpgroups, on their way to other threads
    return min((SHARED_BYTES - sums) // (256 * 64 + halves * block_m * 128), 8)


def launch(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    weights: Tensor,
    order: Tensor,
    entries: Tensor,
    out: Tensor,
    block_m: int,
    activation: str = "",
    following: QuantizedWeight | None = None,
) -> None:
    """x: pairs in order [pairs, width]; out: with an activation, likewise, for the weight `following`; see
    `_quantized_experts_kernel`.
    """
    n = weight.codes.shape[1] // (2 if activation else 1)
    row, k = weight.codes.shape[2], weight.num_channels
    codes = weight.codes.flatten(0, 1).view(torch.int32)
    scale = weight.scale.view(torch.uint8) if weight.scale.dtype == torch.float8_e4m3fn else weight.scale
    assert x.is_contiguous()
    assert codes.is_contiguous()
    assert scale.is_contiguous()
    num_tiles = len(entries) * cdiv(n, 128 if activation else 256)
    _quantized_experts_kernel[(min(num_tiles, _multiprocessors(x.device)),)](
        _boxes(x, block_m, 64, 128), _boxes(codes, 64, 16, 64), scale, scale if weight.zero is None else weight.zero,
        scale if weight.factor is None else weight.factor, out if bias is None else bias, weights, order, entries, out,
        num_tiles, N=n, K=k, KIND=weight.kind, GROUP=weight.group, ROWS=weight.rows, HALVES=k // row,
        ZERO=weight.zero is not None, FACTOR=weight.factor is not None, BIAS=bias is not None, ACTIVATION=activation,
        NEXT_BYTES=n if following is None else following.codes.shape[2], BLOCK_M=block_m, STAGES=_stages(block_m, k // row),
        REGISTERS=REGISTERS, num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
