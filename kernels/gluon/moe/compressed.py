"""Experts of bfloat16 in 12 bits a weight on Hopper's tensor cores, in Gluon; see `kernels.data.compressed_weight`.

A program multiplies 128 rows of an expert's weight, 64 in each of two warpgroups, by up to BLOCK_M of its routed
tokens, which lie side by side in memory. While the tensor core multiplies a step of 64 channels, the warpgroup decodes
the next one's weights into other registers. A third warp asks for weights and x, stages ahead. The values of codes are
tiny, so x comes times 2^64.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

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

from kernels.data.compressed_weight import CompressedWeight
from kernels.data.moe import Tiles
from kernels.gluon.common.activation import activate_gated
from kernels.gluon.common.compressed_bits import (
    DOWN,
    UP,
    decode_fragments,
    listed_channel,
    listed_row,
    listed_value,
    piece_layout,
)
from kernels.gluon.common.layouts import box_descriptor
from kernels.gluon.common.weight_only import half_sums, halves_of_sums
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs


@triton.jit
def _gather_kernel(
    x, order, out, stride_x, K: tl.constexpr, CHOSEN: tl.constexpr, TIMES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [routed token in order, K]: each routed token's token, times `TIMES`."""
    position = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:  # in this order: the next kernel reads the entries, which were written before, ahead of its own wait
        wait_for_inputs()
        launch_dependents()
    pair = tl.load(order + position).to(tl.int64)
    values = tl.load(x + pair // CHOSEN * stride_x + channel, mask=channel < K, other=0.0).to(tl.float32) * TIMES
    tl.store(out + position * K + channel, values, mask=channel < K)


def gather(x: Tensor, order: Tensor, chosen: int) -> Tensor:
    """x [tokens, K] → routed tokens in order [routed tokens, K], times 2^64, as `launch` takes them."""
    k = x.shape[1]
    out = torch.empty(len(order), k, dtype=x.dtype, device=x.device)
    block = min(next_power_of_2(k), 4096)
    _gather_kernel[(len(order), cdiv(k, block))](
        x, order, out, x.stride(0), K=k, CHOSEN=chosen, TIMES=2.0**64, BLOCK=block,
        num_warps=min(max(block // 512, 1), 4), **pdl_options(x.device),
    )  # fmt: skip
    return out


@gluon.jit
def _decoded(codes_smem, at, A: gl.constexpr):
    """A step's weights of a warpgroup's 64 rows, from words that begin at a piece."""
    WORDS: gl.constexpr = piece_layout()
    first = codes_smem.index(at).load(WORDS)
    second = codes_smem.index(at + 1).load(WORDS)
    exponents = codes_smem.index(at + 2).load(WORDS)
    values = decode_fragments(first, second, exponents, 4).reshape([64, 64])
    return gl.convert_layout(values, A, assert_trivial=True)


@gluon.jit
def _ask(codes_desc, boxes_smem, full, row, step, stage):
    for i in gl.static_range(3):
        at = row + step * 96 + i * 32
        tma.async_copy_global_to_shared(codes_desc, [at, 0], full.index(stage), boxes_smem.index(stage * 3 + i))


@gluon.jit
def _bring(
    x_desc, codes_desc, x_smem, boxes_smem, full, empty, pair, row,
    STEPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Ask for each step's weights and channels of x once its stage is empty. PDL: the first weights before x is
    there.
    """
    NUM_BYTES: gl.constexpr = 3 * codes_desc.block_type.nbytes + x_desc.block_type.nbytes
    AHEAD: gl.constexpr = min(STAGES, STEPS) if PDL else 0
    for step in gl.static_range(AHEAD):
        mbarrier.expect(full.index(step), NUM_BYTES)
        _ask(codes_desc, boxes_smem, full, row, step, step)
    if PDL:
        wait_for_inputs()
    for step in range(STEPS):
        stage = step % STAGES
        if step >= AHEAD:
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), NUM_BYTES)
            _ask(codes_desc, boxes_smem, full, row, step, stage)
        tma.async_copy_global_to_shared(x_desc, [pair, step * 64], full.index(stage), x_smem.index(stage))


@gluon.jit
def _small_weights(small, x, small_smem, first, stop, K: gl.constexpr, ROOM: gl.constexpr, A: gl.constexpr):
    """A block's small weights [64, ROOM], one in each column; and their channels of x [BLOCK_M, ROOM] into shared
    memory.
    """
    X: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROOM, ROOM // 8], [4, 1], [1, 0])
    listed = gl.load(small + gl.arange(0, ROOM, layout=gl.SliceLayout(0, A)))[None, :]
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, A))[:, None]
    w = gl.where(listed_row(listed) == row, listed_value(listed), 0.0)
    listed = gl.load(small + gl.arange(0, ROOM, layout=gl.SliceLayout(0, X)))[None, :]
    position = first + gl.arange(0, small_smem.shape[0], layout=gl.SliceLayout(1, X)).to(gl.int64)[:, None]
    there = (listed != 0) & (position < stop)
    values = gl.load(x + position * K + listed_channel(listed), mask=there, other=0.0).to(gl.float32) * DOWN * DOWN
    small_smem.store(values.to(gl.bfloat16))
    fence_async_shared()
    return w


@gluon.jit
def _multiply(
    x, scale, small, weights, order, out, x_smem, small_smem, codes_smem, full, empty, first, stop, n,
    WG: gl.constexpr, N: gl.constexpr, K: gl.constexpr, ROOM: gl.constexpr, ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warpgroup's rows; scale and small are those of its block. See `_compressed_experts_kernel`."""
    GATED: gl.constexpr = ACTIVATION != ""
    STEPS: gl.constexpr = K // 64
    OWN: gl.constexpr = 32 if GATED else 64  # rows of out
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OUT: gl.constexpr = half_sums(BLOCK_M) if GATED else ACC
    n = n + WG * OWN
    acc = gl.zeros([64, BLOCK_M], gl.float32, ACC)
    if PDL:
        wait_for_inputs()
    own_smem = small_smem.index(WG)
    w = _small_weights(small, x, own_smem, first, stop, K, ROOM, A)
    acc = warpgroup_mma(w, own_smem.permute((1, 0)), acc, is_async=False)
    mbarrier.wait(full.index(0), 0)
    values = _decoded(codes_smem, WG * 3, A)
    if STEPS % 2:
        acc, values = _step(acc, values, x_smem, codes_smem, full, empty, 0, WG, STEPS, STAGES, A)
    # Unrolled by two: each step has registers of its own.
    for turn in range(STEPS // 2):
        step = STEPS % 2 + 2 * turn
        acc, values = _step(acc, values, x_smem, codes_smem, full, empty, step, WG, STEPS, STAGES, A)
        acc, values = _step(acc, values, x_smem, codes_smem, full, empty, step + 1, WG, STEPS, STAGES, A)
    acc *= (gl.load(scale + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))) * DOWN)[:, None]
    position = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    outputs = n + gl.arange(0, OWN, layout=gl.SliceLayout(1, OUT))
    if GATED:
        gate, up = halves_of_sums(acc, OUT)
        result = activate_gated(gate, up, ACTIVATION) * UP
        at = position.to(gl.int64)[None, :] * N + outputs[:, None]
    else:
        pair = gl.load(order + gl.minimum(position, stop - 1))
        result = acc * gl.load(weights + pair)[None, :]
        at = pair.to(gl.int64)[None, :] * N + outputs[:, None]
    mask = (outputs < N)[:, None] & (position < stop)[None, :]
    gl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _step(
    acc, values, x_smem, codes_smem, full, empty, step,
    WG: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """acc + the products of a step, whose weights are `values`; and the weights of the next step."""
    stage = step % STAGES
    sums = warpgroup_mma(values, x_smem.index(stage).permute((1, 0)), warpgroup_mma_init(acc), is_async=True)
    following = gl.minimum(step + 1, STEPS - 1)
    mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
    # Registers that the tensor core still reads must not be written: these are others.
    next_values = _decoded(codes_smem, following % STAGES * 6 + WG * 3, A)
    # What comes before a branch stays there: so weights are decoded before the wait and not after it.
    mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
    acc, next_values, _ = warpgroup_mma_wait(0, deps=[sums, next_values, values])
    mbarrier.arrive(empty.index(stage))
    return acc, next_values


@gluon.jit
def _tile(
    x_desc, codes_desc, x, scale, small, weights, order, out, x_smem, small_smem, codes_smem, boxes_smem, full, empty,
    row, first, stop, n,
    N: gl.constexpr, K: gl.constexpr, ROOM: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M routed tokens; scale and small are those of the program's first block. See
    `_compressed_experts_kernel`.
    """
    gl.warp_specialize(
        [
            (_multiply, (
                x, scale, small, weights, order, out, x_smem, small_smem, codes_smem, full, empty, first, stop, n,
                gl.constexpr(0), N, K, ROOM, ACTIVATION, BLOCK_M, STAGES, PDL,
            )),
            (_multiply, (
                x, scale + 64, small + ROOM, weights, order, out, x_smem, small_smem, codes_smem, full, empty, first,
                stop, n, gl.constexpr(1), N, K, ROOM, ACTIVATION, BLOCK_M, STAGES, PDL,
            )),
            (_bring, (
                x_desc, codes_desc, x_smem, boxes_smem, full, empty, first, row, gl.constexpr(K // 64), STAGES, PDL,
            )),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def _compressed_experts_kernel(
    x_desc, half_x_desc, codes_desc, x, scale, small, weights, order, entries, out,
    N: gl.constexpr, K: gl.constexpr, ROOM: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr,
    SMALL_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """128 rows of one tile of routed tokens, from x [routed token in order, K] times 2^64; `entries` are of
    `kernels.triton.pairs`.

    At most SMALL_M routed tokens, unless it is 0, are computed as such a tile. With ACTIVATION: that of gate and up,
    times 2^64, out [routed token in order, N]; the weight has 2N rows. Else out [routed token, N], times the routed
    token's routing weight. The first weights are asked for while the kernel before still runs: it waited for `entries`.
    """
    GATED: gl.constexpr = ACTIVATION != ""
    TILES: gl.constexpr = N // 64 if GATED else N // 128
    X_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    CODES_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    entry = entries + gl.program_id(0) // TILES * 3
    tile = gl.program_id(0) % TILES
    if PDL:
        launch_dependents()
    expert = gl.load(entry)
    first = gl.load(entry + 1)
    stop = gl.load(entry + 2)
    if expert >= 0:
        x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, 64], X_TILE)
        SMALL_TILE: gl.constexpr = gl.NVMMASharedLayout(
            swizzle_byte_width=min(2 * ROOM, 128), element_bitwidth=16, rank=2
        )
        small_smem = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_M, ROOM], SMALL_TILE)
        boxes_smem = gl.allocate_shared_memory(gl.int32, [STAGES * 3, 32, 32], CODES_TILE)
        codes_smem = boxes_smem._reinterpret(gl.int32, [STAGES * 6, 16, 32], CODES_TILE)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        fence_async_shared()
        n = tile * (64 if GATED else 128)
        block = expert * (TILES * 2) + tile * 2
        scale += block * 64
        small += block * ROOM
        row = (expert * TILES + tile) * (K // 64 * 96)
        if SMALL_M == 0:
            _tile(
                x_desc, codes_desc, x, scale, small, weights, order, out, x_smem, small_smem, codes_smem, boxes_smem,
                full, empty, row, first, stop, n, N, K, ROOM, ACTIVATION, BLOCK_M, STAGES, REGISTERS, PDL,
            )  # fmt: skip
        elif stop - first <= SMALL_M:
            half_x_smem = x_smem._reinterpret(gl.bfloat16, [STAGES * 2, SMALL_M, 64], X_TILE)
            half_small_smem = small_smem._reinterpret(gl.bfloat16, [4, SMALL_M, ROOM], SMALL_TILE)
            _tile(
                half_x_desc, codes_desc, x, scale, small, weights, order, out, half_x_smem, half_small_smem, codes_smem,
                boxes_smem, full, empty, row, first, stop, n, N, K, ROOM, ACTIVATION, SMALL_M, STAGES, REGISTERS, PDL,
            )  # fmt: skip
        else:
            _tile(
                x_desc, codes_desc, x, scale, small, weights, order, out, x_smem, small_smem, codes_smem, boxes_smem,
                full, empty, row, first, stop, n, N, K, ROOM, ACTIVATION, BLOCK_M, STAGES, REGISTERS, PDL,
            )  # fmt: skip
    elif PDL:
        wait_for_inputs()  # so that the next kernel does not overtake the one before this


SHARED_BYTES = 228_000  # of a multiprocessor
MIN_DIVIDED = 32  # routed tokens of a tile from which on one that is at most half full has code of its own


def launch(
    x: Tensor,
    weight: CompressedWeight,
    weights: Tensor,
    tiles: Tiles,
    out: Tensor,
    activation: str = "",
) -> None:
    """x: routed tokens in order [routed tokens, K], times 2^64; see `_compressed_experts_kernel`."""
    _, n, k = weight.shape
    n, block_m = n // 2 if activation else n, tiles.block_m
    small_m = block_m // 2 if block_m >= MIN_DIVIDED else 0
    room = weight.small.shape[2]
    stage, others = 96 * 128 + block_m * 128, 4 * block_m * room
    programs, registers, at_start = (3, 72, 56) if block_m <= 32 else (2, 104, 80) if block_m <= 64 else (1, 240, None)
    stages = min((SHARED_BYTES // programs - others) // stage, 8)
    assert stages >= 2, "while one is multiplied, the next one is decoded"
    assert x.is_contiguous()
    assert weight.gated == bool(activation)
    columns = n // 64 if activation else n // 128
    _compressed_experts_kernel[(len(tiles.entries) * columns,)](
        box_descriptor(x, block_m, 64), box_descriptor(x, small_m or block_m, 64),
        box_descriptor(weight.codes.view(-1, 32), 32, 32), x, weight.scale, weight.small, weights, *tiles[:2], out,
        N=n, K=k, ROOM=room, ACTIVATION=activation, BLOCK_M=block_m, SMALL_M=small_m, STAGES=stages,
        REGISTERS=registers, num_warps=4, maxnreg=at_start, **pdl_options(x.device),
    )  # fmt: skip
