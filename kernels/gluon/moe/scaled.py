"""Experts of e4m3 codes times tokens of e4m3 codes on Hopper's tensor cores, both with scales of 128 channels, in
Gluon.

A program multiplies a tile of routed tokens, which lie side by side in memory, by 256 rows of an expert's weight, 128
channels a step: as many as have one scale, and lie side by side in a panel of the weight. A step's sums are scaled
before they are added up, in float32. Another warp asks for codes, stages ahead. Quarters of gate rows and of up rows
alternate, so that one thread has the sums of both.

A warpgroup multiplies 64 routed tokens, which are the rows of the tensor core's products, or up to 32, which are their
columns. Then there is less to compute, but the routed tokens' scales fill more registers.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.data.moe import Tiles
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.gluon.common.activation import activate_gated
from kernels.gluon.common.layouts import box_descriptor, side_by_side
from kernels.gpu.device import is_hopper
from kernels.gpu.launch import EARLY, launch_dependents, pdl_options, wait_for_inputs

GROUP = 128  # channels of a panel, which one scale is for, and rows of a weight
SHARED_BYTES = 224_000  # of a multiprocessor


@gluon.jit
def _bring(
    x_desc, codes_desc, x_smem, codes_smem, full, empty, first, stop, row,
    N: gl.constexpr, STEPS: gl.constexpr, PIECES: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Ask for each step's codes once its stage is empty: of x 32 routed tokens at once, those boxes that have any.

    With PDL the weight's first codes are asked for before x is there.
    """
    AHEAD: gl.constexpr = min(STAGES, STEPS) if PDL else 0
    boxes = (gl.minimum(stop - first, BLOCK_M) + 31) // 32
    for step in gl.static_range(AHEAD):
        _ask_weight(x_desc, codes_desc, codes_smem, full, step, row, step, boxes, N, PIECES, BLOCK_M)
    if PDL:
        wait_for_inputs()
    for step in range(STEPS):
        stage = step % STAGES
        if step >= AHEAD:
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            _ask_weight(x_desc, codes_desc, codes_smem, full, stage, row, step, boxes, N, PIECES, BLOCK_M)
        for box in range(boxes):
            tma.async_copy_global_to_shared(
                x_desc, [first + box * 32, step * 128], full.index(stage), x_smem.index(stage * (BLOCK_M // 32) + box)
            )


@gluon.jit
def _ask_weight(
    x_desc, codes_desc, codes_smem, full, stage, row, step, boxes,
    N: gl.constexpr, PIECES: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Expect the bytes of a step with so many boxes of x, and ask for the weight's: with two pieces gate rows and up
    rows.
    """
    ROWS: gl.constexpr = codes_desc.block_shape[0]
    for count in gl.static_range(1, BLOCK_M // 32 + 1):  # the compiler must know the number of bytes
        if boxes == count:
            mbarrier.expect(
                full.index(stage), 2 * PIECES * codes_desc.block_type.nbytes + count * x_desc.block_type.nbytes
            )
    for i in gl.static_range(2 * PIECES):
        tma.async_copy_global_to_shared(
            codes_desc, [row + step * (PIECES * N) + i // PIECES * ROWS + i % PIECES * N, 0], full.index(stage),
            codes_smem.index(stage * 2 * PIECES + i),
        )  # fmt: skip


@gluon.jit
def _multiply(
    scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first, stop, n,
    WARPGROUP: gl.constexpr, N: gl.constexpr, STEPS: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 routed tokens, if there are any. See `_scaled_experts_kernel`."""
    if PDL:
        wait_for_inputs()
    first = first + WARPGROUP * 64
    if first < stop:
        GATED: gl.constexpr = ACTIVATION != ""
        QUARTER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
        position = first + gl.arange(0, 64, layout=gl.SliceLayout(1, QUARTER))
        scale += n // 128 * STEPS
        sums = _sums_of_groups(
            scale, scale + (N // 128 if GATED else 1) * STEPS,
            x_scale + gl.minimum(position, stop - 1).to(gl.int64) * STEPS,
            x_smem, codes_smem, full, empty, STEPS, WARPGROUP, GATED, BLOCK_M, 2, STAGES,
        )  # fmt: skip
        _store(sums, weights, order, out, out_scale, first, stop, n, N, ACTIVATION)
    else:
        for step in range(STEPS):
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(empty.index(step % STAGES))


@gluon.jit
def _multiply_few(
    scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first, stop, n,
    N: gl.constexpr, STEPS: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """All of a tile's routed tokens. See `_scaled_experts_kernel`."""
    if PDL:
        wait_for_inputs()
    GATED: gl.constexpr = ACTIVATION != ""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    position = gl.minimum(first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SUMS)), stop - 1)
    scale += n // 128 * STEPS
    more_scale = scale + (N // 128 if GATED else 1) * STEPS
    x_scale += position.to(gl.int64) * STEPS
    total0 = gl.zeros([64, BLOCK_M], gl.float32, SUMS)
    total1 = gl.zeros([64, BLOCK_M], gl.float32, SUMS)
    total2 = gl.zeros([64, BLOCK_M], gl.float32, SUMS)
    total3 = gl.zeros([64, BLOCK_M], gl.float32, SUMS)
    no_sum = gl.zeros([64, BLOCK_M], gl.float32, SUMS)
    of_x = gl.load(x_scale)
    of_rows = gl.load(scale)
    of_more = gl.load(more_scale)
    for step in range(STEPS):
        stage = step % STAGES
        following = gl.minimum(step + 1, STEPS - 1)
        next_of_x = gl.load(x_scale + following)
        next_of_rows = gl.load(scale + following)
        next_of_more = gl.load(more_scale + following)
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        x = x_smem.index(stage).permute((1, 0))
        s0 = warpgroup_mma(codes_smem.index(stage * 4), x, no_sum, use_acc=False, is_async=True)
        s1 = warpgroup_mma(codes_smem.index(stage * 4 + 1), x, no_sum, use_acc=False, is_async=True)
        s2 = warpgroup_mma(codes_smem.index(stage * 4 + 2), x, no_sum, use_acc=False, is_async=True)
        s3 = warpgroup_mma(codes_smem.index(stage * 4 + 3), x, no_sum, use_acc=False, is_async=True)
        s0 = warpgroup_mma_wait(3, deps=[s0])
        total0 += s0 * (of_x * of_rows)[None, :]
        s1 = warpgroup_mma_wait(2, deps=[s1])
        total1 += s1 * (of_x * (of_more if GATED else of_rows))[None, :]
        s2 = warpgroup_mma_wait(1, deps=[s2])
        total2 += s2 * (of_x * (of_rows if GATED else of_more))[None, :]
        s3 = warpgroup_mma_wait(0, deps=[s3])
        mbarrier.arrive(empty.index(stage))
        total3 += s3 * (of_x * of_more)[None, :]
        of_x = next_of_x
        of_rows = next_of_rows
        of_more = next_of_more
    _store_few((total0, total1, total2, total3), weights, order, out, out_scale, first, stop, n, N, ACTIVATION, BLOCK_M)


@gluon.jit
def _sums_of_groups(
    scale, more_scale, x_scale, x_smem, codes_smem, full, empty, steps,
    WARPGROUP: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """[64, 64] of each quarter of 256 rows; of 128, with HALVES 1, the last two are 0. GATED: the second and the last
    quarter are up rows.

    scale and more_scale: pointers to the first half's scales and the second's, or to those of gate rows and up rows;
    x_scale [64]: to those of x. The scales of a row's groups lie side by side.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    sums = gl.zeros([64, 128], gl.float32, ACC)  # of the present product
    total0 = gl.zeros([64, 64], gl.float32, QUARTER)
    total1 = gl.zeros([64, 64], gl.float32, QUARTER)
    total2 = gl.zeros([64, 64], gl.float32, QUARTER)
    total3 = gl.zeros([64, 64], gl.float32, QUARTER)
    of_x = gl.load(x_scale)
    of_rows = gl.load(scale)
    of_more = gl.load(more_scale)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        x = x_smem.index(stage * (BLOCK_M // 64) + WARPGROUP)
        sums = warpgroup_mma(x, codes_smem.index(stage * HALVES).permute((1, 0)), sums, use_acc=False, is_async=True)
        following = gl.minimum(step + 1, steps - 1)
        next_of_x = gl.load(x_scale + following)
        next_of_rows = gl.load(scale + following)
        next_of_more = gl.load(more_scale + following)
        sums = warpgroup_mma_wait(0, deps=[sums])
        if HALVES == 1:
            mbarrier.arrive(empty.index(stage))
        low, high = _quarters(sums)
        total0 = _computed(total0 + low * (of_x * of_rows)[:, None])
        total1 = _computed(total1 + high * (of_x * (of_more if GATED else of_rows))[:, None])
        if HALVES == 2:
            sums = warpgroup_mma(x, codes_smem.index(stage * 2 + 1).permute((1, 0)), sums, use_acc=False, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(empty.index(stage))
            low, high = _quarters(sums)
            total2 += low * (of_x * (of_rows if GATED else of_more))[:, None]
            total3 += high * (of_x * of_more)[:, None]
        of_x = next_of_x
        of_rows = next_of_rows
        of_more = next_of_more
    return total0, total1, total2, total3


@gluon.jit
def _quarters(sums):
    """The columns of sums [64, 128], one half after the other; a thread has those of both."""
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    low, high = gl.split(sums.reshape([64, 2, 64]).permute([0, 2, 1]))
    return gl.convert_layout(low, QUARTER), gl.convert_layout(high, QUARTER)


@gluon.jit
def _computed(values):
    """The same. The compiler cannot move its computation behind the next product: registers hold the sums of one
    only.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [values], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _store(sums, weights, order, out, out_scale, first, stop, n, N: gl.constexpr, ACTIVATION: gl.constexpr):
    """Store the results of 64 routed tokens. Each thread stores eight values that lie side by side."""
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    OUT: gl.constexpr = side_by_side(64, 8)
    position = first + gl.arange(0, 64, layout=gl.SliceLayout(1, QUARTER))
    out_position = first + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    mask = (out_position < stop)[:, None]
    columns = n + gl.arange(0, 64, layout=gl.SliceLayout(0, OUT))[None, :]
    if ACTIVATION != "":
        low, high, scale = _activated(sums, ACTIVATION, 1)
        gl.store(out_scale + gl.minimum(position, stop - 1) * (N // 128) + n // 128, scale, mask=position < stop)
        at = out + out_position.to(gl.int64)[:, None] * N + columns
        gl.store(at, gl.convert_layout((low / scale[:, None]).to(out.dtype.element_ty), OUT), mask=mask)
        gl.store(at + 64, gl.convert_layout((high / scale[:, None]).to(out.dtype.element_ty), OUT), mask=mask)
    else:
        weight = gl.load(weights + gl.load(order + gl.minimum(position, stop - 1)))[:, None]
        pair = gl.load(order + gl.minimum(out_position, stop - 1))
        at = out + pair.to(gl.int64)[:, None] * N + columns
        for quarter in gl.static_range(4):
            values = gl.convert_layout((sums[quarter] * weight).to(out.dtype.element_ty), OUT)
            gl.store(at + quarter * 64, values, mask=mask)


@gluon.jit
def _store_few(
    sums, weights, order, out, out_scale, first, stop, n,
    N: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The same as above for accumulators [64, BLOCK_M], one column per routed token.
    Each thread stores at least 16 bytes that lie side by side.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    SIZE: gl.constexpr = 16 if ACTIVATION != "" else 8
    OUT: gl.constexpr = gl.BlockedLayout([SIZE, 1], [64 // SIZE, SIZE // 2], [1, 4], [0, 1])
    position = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SUMS))
    out_position = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    mask = (out_position < stop)[None, :]
    rows = n + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))[:, None]
    if ACTIVATION != "":
        low, high, scale = _activated(sums, ACTIVATION, 0)
        gl.store(out_scale + gl.minimum(position, stop - 1) * (N // 128) + n // 128, scale, mask=position < stop)
        at = out + out_position.to(gl.int64)[None, :] * N + rows
        gl.store(at, gl.convert_layout((low / scale[None, :]).to(out.dtype.element_ty), OUT), mask=mask)
        gl.store(at + 64, gl.convert_layout((high / scale[None, :]).to(out.dtype.element_ty), OUT), mask=mask)
    else:
        weight = gl.load(weights + gl.load(order + gl.minimum(position, stop - 1)))[None, :]
        pair = gl.load(order + gl.minimum(out_position, stop - 1))
        at = out + pair.to(gl.int64)[None, :] * N + rows
        for quarter in gl.static_range(4):
            values = gl.convert_layout((sums[quarter] * weight).to(out.dtype.element_ty), OUT)
            gl.store(at + quarter * 64, values, mask=mask)


@gluon.jit
def _activated(sums, ACTIVATION: gl.constexpr, AXIS: gl.constexpr):
    """Activations of 128 channels, in two halves, and what each routed token's must be divided by to become codes.
    AXIS: channels'.
    """
    low = activate_gated(sums[0], sums[1], ACTIVATION)
    high = activate_gated(sums[2], sums[3], ACTIVATION)
    largest = gl.max(gl.maximum(gl.maximum(low, -low), gl.maximum(high, -high)), AXIS)
    return low, high, gl.maximum(largest, 1e-12) / 448.0


@gluon.jit
def _scaled_experts_kernel(
    x_desc, codes_desc, scale, x_scale, weights, order, entries, out, out_scale,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """256 rows of one tile of routed tokens, from codes x [routed token in order, K] and their scales [routed token in
    order, K / 128].

    `entries` are of `kernels.triton.pairs`. With ACTIVATION: that of gate and up, as codes out [routed token in order,
    N] and scales out_scale [routed token in order, N / 128]; the weight has 2N rows. Else out [routed token, N], times
    the routed token's routing weight. Its first weights are asked for while the kernel before still runs: that one must
    have waited for `entries` and `order`.
    """
    GATED: gl.constexpr = ACTIVATION != ""
    PIECES: gl.constexpr = 2 if GATED else 1
    STEPS: gl.constexpr = K // 128
    OWN: gl.constexpr = 256 // PIECES  # rows of out
    WARPGROUPS: gl.constexpr = (BLOCK_M + 63) // 64
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    entry = entries + gl.program_id(0) // (N // OWN) * 3
    n = gl.program_id(0) % (N // OWN) * OWN
    if PDL:
        launch_dependents()
    expert = gl.load(entry, cache_modifier=EARLY)
    first = gl.load(entry + 1, cache_modifier=EARLY)
    stop = gl.load(entry + 2, cache_modifier=EARLY)
    if BLOCK_M == 32:
        stop = gl.minimum(stop, first + BLOCK_M)
    if expert >= 0:
        x_boxes = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (BLOCK_M // 32), 32, 128], TILE)
        codes_boxes = gl.allocate_shared_memory(codes_desc.dtype, [STAGES * 2 * PIECES, 128 // PIECES, 128], TILE)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=WARPGROUPS)
        fence_async_shared()
        scale += expert * (PIECES * N // 128 * STEPS)
        row = expert * (STEPS * PIECES * N) + n  # in the first panel
        if BLOCK_M == 32:  # written out three times: Gluon cannot join tuples of constants
            x_smem = x_boxes
            codes_smem = codes_boxes._reinterpret(codes_desc.dtype, [STAGES * 4, 64, 128], TILE)
            gl.warp_specialize(
                [
                    (_multiply_few, (
                        scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first, stop, n,
                        N, STEPS, ACTIVATION, BLOCK_M, STAGES, PDL,
                    )),
                    (_bring, (
                        x_desc, codes_desc, x_boxes, codes_boxes, full, empty, first, stop, row,
                        N, STEPS, PIECES, BLOCK_M, STAGES, PDL,
                    )),
                ],
                [1], [24],
            )  # fmt: skip
        elif BLOCK_M == 64:
            x_smem = x_boxes._reinterpret(x_desc.dtype, [STAGES, 64, 128], TILE)
            codes_smem = codes_boxes._reinterpret(codes_desc.dtype, [STAGES * 2, 128, 128], TILE)
            gl.warp_specialize(
                [
                    (_multiply, (
                        scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first, stop, n,
                        gl.constexpr(0), N, STEPS, ACTIVATION, BLOCK_M, STAGES, PDL,
                    )),
                    (_bring, (
                        x_desc, codes_desc, x_boxes, codes_boxes, full, empty, first, stop, row,
                        N, STEPS, PIECES, BLOCK_M, STAGES, PDL,
                    )),
                ],
                [1], [24],
            )  # fmt: skip
        else:
            x_smem = x_boxes._reinterpret(x_desc.dtype, [STAGES * 2, 64, 128], TILE)
            codes_smem = codes_boxes._reinterpret(codes_desc.dtype, [STAGES * 2, 128, 128], TILE)
            gl.warp_specialize(
                [
                    (_multiply, (
                        scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first, stop, n,
                        gl.constexpr(0), N, STEPS, ACTIVATION, BLOCK_M, STAGES, PDL,
                    )),
                    (_multiply, (
                        scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first, stop, n,
                        gl.constexpr(1), N, STEPS, ACTIVATION, BLOCK_M, STAGES, PDL,
                    )),
                    (_bring, (
                        x_desc, codes_desc, x_boxes, codes_boxes, full, empty, first, stop, row,
                        N, STEPS, PIECES, BLOCK_M, STAGES, PDL,
                    )),
                ],
                [4, 1], [240, 24],
            )  # fmt: skip


def supports(weight: Weight, dtype: torch.dtype) -> bool:
    """Return whether `launch` computes tokens of `dtype`, quantised, and the checkpoint allows that."""
    return (
        isinstance(weight, QuantizedWeight)
        and weight.rounds_activations
        and weight.kind == "e4m3"
        and weight.group == weight.rows == GROUP
        and weight.scale.dtype == torch.float32
        and weight.zero is weight.factor is weight.order is None
        and weight.codes.shape[1] % 256 == weight.num_channels % GROUP == 0
        and dtype == torch.bfloat16
        and is_hopper(weight.device)
    )


def block_m(pairs: float) -> int:
    """Return the number of routed tokens in a tile, for experts with so many on average."""
    return 32 if pairs <= 16 else 64 if pairs <= 48 else 128


def launch(
    x: Tensor,
    x_scale: Tensor,
    weight: QuantizedWeight,
    weights: Tensor,
    tiles: Tiles,
    out: Tensor,
    out_scale: Tensor | None,
    activation: str = "",
) -> None:
    """See `_scaled_experts_kernel`."""
    pieces = 2 if activation else 1
    n, k = weight.codes.shape[1] // pieces, weight.num_channels
    block_m, codes = tiles.block_m, weight.codes.view(-1, GROUP)
    assert weight.panel == GROUP
    assert x.is_contiguous()
    assert x_scale.is_contiguous()
    assert weight.scale.is_contiguous()
    programs = 1 if block_m == 128 else 2  # on a multiprocessor
    stages = 3 if block_m == 32 else min(SHARED_BYTES // programs // ((256 + block_m) * 128), 8)
    _scaled_experts_kernel[(len(tiles.entries) * (n * pieces // 256),)](
        box_descriptor(x, 32, 128), box_descriptor(codes, 128 // pieces, 128), weight.scale, x_scale, weights,
        *tiles[:2], out, x_scale if out_scale is None else out_scale, N=n, K=k, ACTIVATION=activation, BLOCK_M=block_m,
        STAGES=stages, num_warps=4, maxnreg={32: 112, 64: 128}.get(block_m), **pdl_options(x.device),
    )  # fmt: skip
