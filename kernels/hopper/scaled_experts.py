"""Experts of e4m3 codes times tokens of e4m3 codes on Hopper's matrix unit, both with scales of 128 channels, in Gluon.

A warpgroup multiplies 64 pairs, which lie side by side in memory, by 128 rows of an expert's weight, 128 channels a step: as
many as share a scale. A step's sums are scaled before they are added up, in float32. A warp of its own asks for codes, stages
ahead. Gate and up rows lie side by side in a tile, so that one thread has the sums of both.
"""

# ruff: noqa: RUF005 - Gluon has no unpacking
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

from kernels.hopper.experts_few import _activate
from kernels.hopper.quantized_steps import _boxes
from kernels.hopper.quantized_tiles import _is_hopper
from kernels.quantized_weight import QuantizedWeight, Weight
from kernels.triton.launch import launch_dependents, pdl_options, wait_for_inputs

GROUP = 128  # channels that one scale is for, and rows of a weight
GATED_PARTS = 2  # of 128 rows that a program multiplies one after the other: its 128 outputs have one scale
DOWN_PARTS = 2
SHARED_BYTES = 224_000  # of a multiprocessor


@gluon.jit
def _bring(
    x_desc, codes_desc, x_smem, codes_smem, full, empty, first, stop, row,
    N: gl.constexpr, STEPS: gl.constexpr, PIECES: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Ask for each step's codes once its stage is empty: of x 32 pairs at once, those boxes that have any.

    EARLY: the weight's may be asked for before x is there.
    """
    AHEAD: gl.constexpr = min(STAGES, PARTS * STEPS) if EARLY else 0
    boxes = (gl.minimum(stop - first, BLOCK_M) + 31) // 32
    for step in gl.static_range(AHEAD):
        _expect(x_desc, codes_desc, full, step, boxes, PIECES, BLOCK_M)
        _ask_weight(codes_desc, codes_smem, full, step, row, step, N, STEPS, PIECES)
    if EARLY:
        wait_for_inputs()
    for step in range(PARTS * STEPS):
        stage = step % STAGES
        if step >= AHEAD:
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            _expect(x_desc, codes_desc, full, stage, boxes, PIECES, BLOCK_M)
            _ask_weight(codes_desc, codes_smem, full, stage, row, step, N, STEPS, PIECES)
        for box in range(boxes):
            tma.async_copy_global_to_shared(
                x_desc,
                [first + box * 32, step % STEPS * 128],
                full.index(stage),
                x_smem.index(stage * (BLOCK_M // 32) + box),
            )


@gluon.jit
def _expect(x_desc, codes_desc, full, stage, boxes, PIECES: gl.constexpr, BLOCK_M: gl.constexpr):
    """The bytes of a step with so many boxes of x, a number that must be known to the compiler."""
    for count in gl.static_range(1, BLOCK_M // 32 + 1):
        if boxes == count:
            mbarrier.expect(full.index(stage), PIECES * codes_desc.block_type.nbytes + count * x_desc.block_type.nbytes)


@gluon.jit
def _ask_weight(
    codes_desc, codes_smem, full, stage, row, step, N: gl.constexpr, STEPS: gl.constexpr, PIECES: gl.constexpr
):
    """A step's 128 rows; with two pieces gate rows and their up rows."""
    ROWS: gl.constexpr = codes_desc.block_shape[0]
    for piece in gl.static_range(PIECES):
        tma.async_copy_global_to_shared(
            codes_desc, [row + step // STEPS * ROWS + piece * N, step % STEPS * 128], full.index(stage),
            codes_smem.index(stage * PIECES + piece),
        )  # fmt: skip


@gluon.jit
def _multiply(
    scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first, stop, n,
    WARPGROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 pairs, if there are any. See `_scaled_experts_kernel`."""
    if PDL and ACTIVATION == "":
        wait_for_inputs()
    if first + WARPGROUP * 64 < stop:
        _multiply_pairs(
            scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first + WARPGROUP * 64, stop, n,
            WARPGROUP, N, K, ACTIVATION, PARTS, BLOCK_M, STAGES,
        )  # fmt: skip
    else:
        for step in range(PARTS * (K // 128)):
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(empty.index(step % STAGES))


@gluon.jit
def _multiply_pairs(
    scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first, stop, n,
    WARPGROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    GATED: gl.constexpr = ACTIVATION != ""
    GROUPS: gl.constexpr = K // 128
    OWN: gl.constexpr = 64 if GATED else 128  # outputs of a part
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 32])
    position = first + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    mask = (position < stop)[:, None]
    inside = gl.minimum(position, stop - 1)
    x_scale += inside.to(gl.int64) * GROUPS
    columns = n + gl.arange(0, OWN, layout=gl.SliceLayout(0, OUT))[None, :]
    zero = gl.zeros([64, 128], gl.float32, ACC)
    activations = ()
    for part in gl.static_range(PARTS):
        block = n // 128 if GATED else n // 128 + part
        acc = gl.zeros([64, OWN], gl.float32, OUT)
        up_acc = gl.zeros([64, OWN], gl.float32, OUT)
        of_x, of_rows, of_up_rows = _scales(x_scale, scale, block, 0, N, GROUPS, GATED)
        for group in range(GROUPS):
            step = part * GROUPS + group
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            sums = warpgroup_mma(
                x_smem.index(stage * (BLOCK_M // 64) + WARPGROUP), codes_smem.index(stage).permute((1, 0)), zero,
                use_acc=False, is_async=True,
            )  # fmt: skip
            of_next = _scales(x_scale, scale, block, gl.minimum(group + 1, GROUPS - 1), N, GROUPS, GATED)
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(empty.index(stage))
            if GATED:
                gate, up = gl.split(sums.reshape([64, 2, 64]).permute([0, 2, 1]))
                acc += gl.convert_layout(gate, OUT) * (of_x * of_rows)[:, None]
                up_acc += gl.convert_layout(up, OUT) * (of_x * of_up_rows)[:, None]
            else:
                acc += gl.convert_layout(sums, OUT) * (of_x * of_rows)[:, None]
            of_x, of_rows, of_up_rows = of_next
        if GATED:
            activations = activations + (_activate(acc, up_acc, ACTIVATION),)
        else:
            pair = gl.load(order + inside)
            result = acc * gl.load(weights + pair)[:, None]
            at = pair.to(gl.int64)[:, None] * N + columns + part * OWN
            gl.store(out + at, result.to(out.dtype.element_ty), mask=mask)
    if GATED:
        largest = gl.max(gl.maximum(activations[0], -activations[0]), 1)
        for part in gl.static_range(1, PARTS):
            largest = gl.maximum(largest, gl.max(gl.maximum(activations[part], -activations[part]), 1))
        largest = gl.maximum(largest, 1e-12) / 448.0
        gl.store(out_scale + inside * (N // 128) + n // 128, largest, mask=position < stop)
        for part in gl.static_range(PARTS):
            at = position.to(gl.int64)[:, None] * N + columns + part * OWN
            gl.store(out + at, (activations[part] / largest[:, None]).to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _scales(x_scale, scale, block, group, N: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr):
    """Of a group of channels: of the pairs, of the block of rows, and of the block of their up rows."""
    of_rows = gl.load(scale + block * GROUPS + group)
    of_up_rows = of_rows
    if GATED:
        of_up_rows = gl.load(scale + (N // 128 + block) * GROUPS + group)
    return gl.load(x_scale + group), of_rows, of_up_rows


@gluon.jit
def _scaled_experts_kernel(
    x_desc, codes_desc, scale, x_scale, weights, order, entries, out, out_scale,
    N: gl.constexpr, K: gl.constexpr, ACTIVATION: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """128 rows, PARTS times, of one tile of pairs, from codes x [pair in order, K] and their scales [pair in order, K / 128].

    `entries` are of `kernels.triton.moe._sort_kernel`. With ACTIVATION: that of gate and up, as codes out [pair in order, N]
    and scales out_scale [pair in order, N / 128]; the weight has 2N rows. Else out [pair, N], times the pair's routing weight;
    then the weight is asked for while the kernel before still runs.
    """
    GATED: gl.constexpr = ACTIVATION != ""
    PIECES: gl.constexpr = 2 if GATED else 1
    STEPS: gl.constexpr = K // 128
    OWN: gl.constexpr = 128 * PARTS // PIECES  # rows of out
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    entry = entries + gl.program_id(0) // (N // OWN) * 3
    n = gl.program_id(0) % (N // OWN) * OWN
    if PDL and GATED:  # in this order: the next kernel reads the entries before it waits
        wait_for_inputs()
        launch_dependents()
    elif PDL:
        launch_dependents()
    expert = gl.load(entry)
    first = gl.load(entry + 1)
    stop = gl.load(entry + 2)
    if expert >= 0:
        x_parts = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (BLOCK_M // 32), 32, 128], TILE)
        codes_parts = gl.allocate_shared_memory(codes_desc.dtype, [STAGES * PIECES, 128 // PIECES, 128], TILE)
        x_smem = x_parts._reinterpret(x_desc.dtype, [STAGES * (BLOCK_M // 64), 64, 128], TILE)
        codes_smem = codes_parts._reinterpret(codes_desc.dtype, [STAGES, 128, 128], TILE)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=BLOCK_M // 64)
        fence_async_shared()
        scale += expert * (PIECES * N // 128 * STEPS)
        row = expert * (PIECES * N) + n
        if BLOCK_M == 64:
            gl.warp_specialize(
                [
                    (_multiply, (
                        scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first, stop, n,
                        gl.constexpr(0), N, K, ACTIVATION, PARTS, BLOCK_M, STAGES, PDL,
                    )),
                    (_bring, (
                        x_desc, codes_desc, x_parts, codes_parts, full, empty, first, stop, row,
                        N, STEPS, PIECES, PARTS, BLOCK_M, STAGES, gl.constexpr(PDL and not GATED),
                    )),
                ],
                [1], [24],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_multiply, (
                        scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first, stop, n,
                        gl.constexpr(0), N, K, ACTIVATION, PARTS, BLOCK_M, STAGES, PDL,
                    )),
                    (_multiply, (
                        scale, x_scale, weights, order, out, out_scale, x_smem, codes_smem, full, empty, first, stop, n,
                        gl.constexpr(1), N, K, ACTIVATION, PARTS, BLOCK_M, STAGES, PDL,
                    )),
                    (_bring, (
                        x_desc, codes_desc, x_parts, codes_parts, full, empty, first, stop, row,
                        N, STEPS, PIECES, PARTS, BLOCK_M, STAGES, gl.constexpr(PDL and not GATED),
                    )),
                ],
                [4, 1], [REGISTERS, 24],
            )  # fmt: skip


def applies(x: Tensor, weight: Weight) -> bool:
    """Whether this kernel can multiply tokens like x, rounded, by the experts' weight, and the checkpoint allows it."""
    return (
        isinstance(weight, QuantizedWeight)
        and weight.rounds_activations
        and weight.kind == "e4m3"
        and weight.group == weight.rows == GROUP
        and weight.scale.dtype == torch.float32
        and weight.zero is weight.factor is weight.order is None
        and weight.codes.shape[1] % (2 * GROUP) == weight.num_channels % GROUP == 0
        and x.dtype == torch.bfloat16
        and _is_hopper(x.device)
    )


def block_m(pairs: float) -> int:
    """How many pairs a tile has, for experts with so many on average."""
    return 64 if pairs <= 32 else 128


def launch(
    x: Tensor,
    x_scale: Tensor,
    weight: QuantizedWeight,
    weights: Tensor,
    order: Tensor,
    entries: Tensor,
    out: Tensor,
    out_scale: Tensor | None,
    block_m: int,
    activation: str = "",
) -> None:
    """See `_scaled_experts_kernel`."""
    pieces = 2 if activation else 1
    n, k = weight.codes.shape[1] // pieces, weight.num_channels
    parts = GATED_PARTS if activation else DOWN_PARTS
    codes = weight.codes.flatten(0, 1)
    assert x.is_contiguous()
    assert x_scale.is_contiguous()
    assert codes.is_contiguous()
    assert weight.scale.is_contiguous()
    step = (128 + block_m) * 128
    stages = min(SHARED_BYTES // (2 if block_m == 64 else 1) // step, 8)  # of tiles of 64 pairs: two programs on each
    _scaled_experts_kernel[(len(entries) * (n * pieces // (128 * parts)),)](
        _boxes(x, 32, 128, 128), _boxes(codes, 128 // pieces, 128, 128), weight.scale, x_scale, weights, order, entries,
        out, x_scale if out_scale is None else out_scale, N=n, K=k, ACTIVATION=activation, PARTS=parts, BLOCK_M=block_m,
        STAGES=stages, REGISTERS=240, num_warps=4, maxnreg=128 if block_m == 64 else None, **pdl_options(x.device),
    )  # fmt: skip
