"""Experts of few bits, of more than a few tokens, on Hopper's matrix unit, in Gluon.

A program multiplies 128 rows of an expert's weight, 64 in each of two warpgroups, by up to BLOCK_M of its pairs, which lie
side by side in memory. A third warp asks for codes and x, steps of 64 bytes of codes ahead. Codes become bfloat16, times the
scales of their groups, in the registers from which the matrix unit takes them. Of codes of four bits, a byte holds channels j
and j + K / 2: so a step has two pieces of x.

A thread takes 16 bytes of a row at once, of which the matrix unit wants four, in pairs eight channels apart, in each of its
four steps: so x lies in the order of `place_of`.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.hopper.code_bits import decode_words_in_order, scale_of
from kernels.hopper.experts_few import _activate
from kernels.hopper.quantized_tiles import _is_hopper, _rows
from kernels.quantized_weight import QuantizedWeight, Weight
from kernels.triton.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs


@triton.jit
def channel_of(place, BYTES: tl.constexpr):
    """The channel that lies at a place of x in order, or BYTES in a half where there is none; see `place_of`."""
    WIDTH: tl.constexpr = (BYTES + 63) // 64 * 64
    at = place % WIDTH
    channel = at // 64 * 64 + at // 2 % 4 * 16 + at // 16 % 4 * 4 + at // 8 % 2 * 2 + at % 2
    return place // WIDTH, channel


@triton.jit
def place_of(channel, BYTES: tl.constexpr):
    """Where a channel lies in a pair in order: each half of BYTES is filled up to a multiple of 64, and of each 64 channels
    the numbers' bits, which count quarters, steps, pieces and pairs, count steps, pieces, quarters and pairs.
    """
    WIDTH: tl.constexpr = (BYTES + 63) // 64 * 64
    c = channel % BYTES
    place = c // 64 * 64 + c // 4 % 4 * 16 + c // 2 % 2 * 8 + c // 16 % 4 * 2 + c % 2
    return channel // BYTES * WIDTH + place


def width(weight: QuantizedWeight) -> int:
    """Of a pair in order."""
    row = weight.codes.shape[-1]
    return weight.num_channels // row * cdiv(row, 64) * 64


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


@gluon.constexpr_function
def _layout(shape):
    """Of words [64, 16], sixteen bytes of a row to each thread; as [64, 4, 4]; and of what they hold, [64, 4, 4, 2, 2]."""
    more = len(shape) - 3
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    bases = [registers, lanes, [[16, 0, 0], [32, 0, 0]]]
    if more < 0:
        bases = [[[row, 4 * quarter + word] for row, quarter, word in part] for part in bases]
    else:
        bases = [[basis + [0] * more for basis in part] for part in bases]
    if more > 0:
        bases[0] = [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1], *bases[0]]
    return gl.DistributedLinearLayout(*bases, [], shape)


@gluon.jit
def _bring(
    x_desc, codes_desc, x_smem, codes_smem, full, empty, pair, row,
    N: gl.constexpr, STEPS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Ask for each step's codes and channels of x once its stage is empty. EARLY: codes may be asked for before x is there."""
    ROWS: gl.constexpr = codes_desc.block_shape[0]
    NUM_BYTES: gl.constexpr = 2 * PIECES * codes_desc.block_type.nbytes + HALVES * x_desc.block_type.nbytes
    AHEAD: gl.constexpr = min(STAGES, STEPS) if EARLY else 0
    for step in gl.static_range(AHEAD):
        mbarrier.expect(full.index(step), NUM_BYTES)
        for i in gl.static_range(2 * PIECES):
            tma.async_copy_global_to_shared(
                codes_desc, [row + i % PIECES * N + i // PIECES * ROWS, step * 16], full.index(step),
                codes_smem.index(step * 2 * PIECES + i),
            )  # fmt: skip
    if EARLY:
        wait_for_inputs()
    for step in range(STEPS):
        stage = step % STAGES
        if step >= AHEAD:
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), NUM_BYTES)
            for i in gl.static_range(2 * PIECES):
                tma.async_copy_global_to_shared(
                    codes_desc, [row + i % PIECES * N + i // PIECES * ROWS, step * 16], full.index(stage),
                    codes_smem.index(stage * 2 * PIECES + i),
                )  # fmt: skip
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                x_desc, [pair, (half * STEPS + step) * 64], full.index(stage), x_smem.index(stage * HALVES + half)
            )


@gluon.jit
def _load_scales(
    pointers, zero_pointers, step, BYTES: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, HALVES: gl.constexpr,
    ZERO: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Of the groups of each quarter of a step's channels, [rows, 4] for each half; beyond the last group, its own."""
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    scales = ()
    zeros = ()
    for half in gl.static_range(HALVES):
        at = gl.minimum((half * BYTES + step * 64 + quarter * 16) // GROUP, GROUPS - 1)
        scales = scales + (gl.load(pointers + at),)
        if ZERO:
            zeros = zeros + (gl.load(zero_pointers + at),)
    return scales, zeros


@gluon.jit
def _multiply(
    scale, zero, factor, bias, weights, order, out, x_smem, codes_smem, full, empty, first, stop, n,
    WG: gl.constexpr, N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    HALVES: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    NEXT_BYTES: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's rows; pointers to what belongs to the weight are the expert's. See `_quantized_experts_kernel`."""
    GATED: gl.constexpr = ACTIVATION != ""
    BYTES: gl.constexpr = K // HALVES
    STEPS: gl.constexpr = (BYTES + 63) // 64
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    GROUPED: gl.constexpr = GROUPS > 1 or ZERO
    PIECES: gl.constexpr = 2 if GATED else 1
    OWN: gl.constexpr = 64 // PIECES  # rows of out
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    WORDS: gl.constexpr = _layout([64, 16])
    CUT: gl.constexpr = _layout([64, 4, 4])
    CODES: gl.constexpr = _layout([64, 4, 4, 2, 2])
    LAYOUT: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, CODES)))  # of scales
    SUMS: gl.constexpr = gl.BlockedLayout([8, 1, PIECES], [OWN // 8, 256 // OWN, 1], [1, 4, 1], [2, 0, 1])
    OUT: gl.constexpr = gl.SliceLayout(2, SUMS)
    n = n + WG * OWN
    if GROUPED:
        of_rows = _rows(n, N, 64, OWN, gl.SliceLayout(1, LAYOUT))[:, None]
        scale_pointers = scale + of_rows // ROWS * GROUPS
        zero_pointers = zero + of_rows * GROUPS
        scales, zeros = _load_scales(scale_pointers, zero_pointers, 0, BYTES, GROUP, GROUPS, HALVES, ZERO, LAYOUT)
    sums = warpgroup_mma_init(gl.zeros([64, BLOCK_M], gl.float32, ACC))
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        # Registers that the matrix unit still reads must not be written: codes are decoded after the wait.
        words = codes_smem.index(stage * 2 + WG).load(WORDS)
        acc, words = warpgroup_mma_wait(0, deps=[sums, words])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
        low, high = decode_words_in_order(words, KIND, CUT, CODES)
        if GROUPED:
            if ZERO:
                low = low - zeros[0].to(gl.bfloat16)[:, :, None, None, None]
            low = low * scale_of(scales[0]).to(gl.bfloat16)[:, :, None, None, None]
            if HALVES == 2:
                if ZERO:
                    high = high - zeros[1].to(gl.bfloat16)[:, :, None, None, None]
                high = high * scale_of(scales[1]).to(gl.bfloat16)[:, :, None, None, None]
            scales, zeros = _load_scales(
                scale_pointers, zero_pointers, step + 1, BYTES, GROUP, GROUPS, HALVES, ZERO, LAYOUT
            )
        sums = warpgroup_mma(_operand(low, A), x_smem.index(stage * HALVES).permute((1, 0)), acc, is_async=True)
        if HALVES == 2:
            sums = warpgroup_mma(
                _operand(high, A), x_smem.index(stage * HALVES + 1).permute((1, 0)), sums, is_async=True
            )
    acc = warpgroup_mma_wait(0, deps=[sums])

    rows = _rows(n, N, 64, OWN, gl.SliceLayout(1, ACC))
    if not GROUPED:
        acc *= scale_of(gl.load(scale + rows // ROWS))[:, None]
    if FACTOR:
        acc *= gl.load(factor + rows)[:, None]
    if BIAS:
        acc += gl.load(bias + rows).to(gl.float32)[:, None]
    outputs = n + gl.arange(0, OWN, layout=gl.SliceLayout(1, OUT))
    position = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    mask = (outputs < N)[:, None] & (position < stop)[None, :]
    if GATED:
        gate, up = gl.split(gl.convert_layout(acc.reshape([2, OWN, BLOCK_M]).permute([1, 2, 0]), SUMS))
        result = _activate(gate, up, ACTIVATION)
        NEXT_WIDTH: gl.constexpr = (NEXT_BYTES + 63) // 64 * 64 * (N // NEXT_BYTES)
        at = position.to(gl.int64)[None, :] * NEXT_WIDTH + place_of(outputs, NEXT_BYTES)[:, None]
    else:
        pair = gl.load(order + gl.minimum(position, stop - 1))
        result = gl.convert_layout(acc, OUT) * gl.load(weights + pair)[None, :]
        at = pair.to(gl.int64)[None, :] * N + outputs[:, None]
    gl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _operand(w, A: gl.constexpr):
    """Weights [rows, quarters, steps, pairs, pieces] as the operand [rows, 64] of the matrix unit."""
    return gl.convert_layout(w.permute([0, 2, 4, 1, 3]).reshape([w.shape[0], 64]), A)


@gluon.jit
def _quantized_experts_kernel(
    x_desc, codes_desc, scale, zero, factor, bias, weights, order, entries, out,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    NEXT_BYTES: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """128 rows of one tile of pairs, from x [pair in order, width]; `entries` are of `kernels.triton.moe._sort_kernel`.

    With ACTIVATION: that of gate and up, out [pair in order, width] for a weight of rows of NEXT_BYTES; the weight has 2N
    rows. Else out [pair, N], times the pair's routing weight; then codes are asked for while the kernel before still runs.
    """
    GATED: gl.constexpr = ACTIVATION != ""
    STORED: gl.constexpr = 2 * N if GATED else N
    BYTES: gl.constexpr = K // HALVES
    STEPS: gl.constexpr = (BYTES + 63) // 64
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    PIECES: gl.constexpr = 2 if GATED else 1
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
        both_smem = codes_smem._reinterpret(gl.int32, [STAGES * 2, 64, 16], CODES_TILE)
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
        gl.warp_specialize(
            [
                (_multiply, (
                    scale, zero, factor, bias, weights, order, out, x_smem, both_smem, full, empty, first, stop, n,
                    gl.constexpr(0), N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, ACTIVATION, NEXT_BYTES,
                    BLOCK_M, STAGES,
                )),
                (_multiply, (
                    scale, zero, factor, bias, weights, order, out, x_smem, both_smem, full, empty, first, stop, n,
                    gl.constexpr(1), N, K, KIND, GROUP, ROWS, HALVES, ZERO, FACTOR, BIAS, ACTIVATION, NEXT_BYTES,
                    BLOCK_M, STAGES,
                )),
                (_bring, (
                    x_desc, codes_desc, x_smem, codes_smem, full, empty, first, expert * STORED + n,
                    N, STEPS, HALVES, STAGES, PIECES, gl.constexpr(PDL and not GATED),
                )),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip


class Config(NamedTuple):
    """How a product is cut up; see `_quantized_experts_kernel`. max_registers: of a thread at the start; None: all."""

    stages: int
    registers: int
    max_registers: int | None


SHARED_BYTES = 224_000  # of a multiprocessor


def config(x: Tensor, weight: Weight, block_m: int) -> Config | None:
    """How to multiply pairs of tokens like x by the experts' weight; None where this kernel does not apply."""
    if not isinstance(weight, QuantizedWeight) or weight.order is not None:
        return None
    row = weight.codes.shape[2]
    in_one_group = weight.scale.shape[-1] == 1
    if (
        x.dtype != torch.bfloat16
        or row % 16
        or not (in_one_group or weight.group % 16 == 0)
        or not _is_hopper(x.device)
    ):
        return None
    step = 128 * 64 + weight.num_channels // row * block_m * 128
    sums = 2 * 64 * block_m * 4  # of both warpgroups, on their way to other threads
    if block_m <= 64:  # two programs on a multiprocessor
        return Config(min((SHARED_BYTES // 2 - sums) // step, 8), 104, 80)
    return Config(min((SHARED_BYTES - sums) // step, 8), 240, None)


def launch(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    weights: Tensor,
    order: Tensor,
    entries: Tensor,
    out: Tensor,
    block_m: int,
    config: Config,
    activation: str = "",
    following: QuantizedWeight | None = None,
) -> None:
    """x: pairs in order [pairs, width]; out: with an activation, likewise, for the weight `following`, and zeros where no
    channel is; see `_quantized_experts_kernel`.
    """
    n = weight.codes.shape[1] // (2 if activation else 1)
    row, k = weight.codes.shape[2], weight.num_channels
    pieces = 2 if activation else 1
    codes = weight.codes.flatten(0, 1).view(torch.int32)
    scale = weight.scale.view(torch.uint8) if weight.scale.dtype == torch.float8_e4m3fn else weight.scale
    assert x.is_contiguous()
    assert codes.is_contiguous()
    assert scale.is_contiguous()
    _quantized_experts_kernel[(len(entries) * cdiv(n, 128 // pieces),)](
        _boxes(x, block_m, 64, 128), _boxes(codes, 64 // pieces, 16, 64), scale,
        scale if weight.zero is None else weight.zero, scale if weight.factor is None else weight.factor,
        out if bias is None else bias, weights, order, entries, out, N=n, K=k, KIND=weight.kind, GROUP=weight.group,
        ROWS=weight.rows, HALVES=k // row, ZERO=weight.zero is not None, FACTOR=weight.factor is not None,
        BIAS=bias is not None, ACTIVATION=activation, NEXT_BYTES=n if following is None else following.codes.shape[2],
        BLOCK_M=block_m, STAGES=config.stages, REGISTERS=config.registers, num_warps=4, maxnreg=config.max_registers,
        **pdl_options(x.device),
    )  # fmt: skip


def _boxes(tensor: Tensor, rows: int, columns: int, swizzle: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * tensor.element_size(), rank=2)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)
