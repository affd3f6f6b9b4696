"""Products of tens to hundreds of tokens with e4m3 weights, both as codes, on Hopper's tensor cores, in Gluon.

A warpgroup multiplies 64 tokens by 128 rows of the weight, or 256, one half after the other, 128 channels a step. With
scales of blocks, a step's sums are scaled before they are added up, else all of them at the end, in float32. Another
warp asks for codes, stages ahead, and for the first of the weight before x is there. Where tiles are too few for all
multiprocessors, the channels are divided among programs, and another kernel adds up. With SwiGLU gate and up rows lie
side by side in a half, so that one thread has the sums of both.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from typing import NamedTuple

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

from kernels.data.quantized_rows import QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight
from kernels.gluon.common.activation import activate_gated
from kernels.gluon.common.layouts import box_descriptor
from kernels.gluon.moe.scaled import GROUP, SHARED_BYTES, _quarters, _sums_of_groups
from kernels.gpu.device import is_hopper
from kernels.gpu.launch import cdiv, launch_dependents, pdl_options, wait_for_inputs


@gluon.jit
def _bring(
    x_desc, codes_desc, x_smem, codes_smem, full, empty, token, row, first, steps,
    N: gl.constexpr, PIECES: gl.constexpr, HALVES: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Ask for each step's codes once its stage is empty: those of the weight for the first steps before x is there."""
    for step in gl.static_range(STAGES):
        if step < steps:
            _ask_weight(x_desc, codes_desc, codes_smem, full, step, row, first + step, N, PIECES, HALVES, WARPGROUPS)
    if PDL:
        wait_for_inputs()
    for step in range(steps):
        stage = step % STAGES
        if step >= STAGES:
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            _ask_weight(x_desc, codes_desc, codes_smem, full, stage, row, first + step, N, PIECES, HALVES, WARPGROUPS)
        for i in gl.static_range(WARPGROUPS):
            tma.async_copy_global_to_shared(
                x_desc, [token + i * 64, (first + step) * 128], full.index(stage), x_smem.index(stage * WARPGROUPS + i)
            )


@gluon.jit
def _ask_weight(
    x_desc, codes_desc, codes_smem, full, stage, row, step,
    N: gl.constexpr, PIECES: gl.constexpr, HALVES: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """Expect the bytes of a step, and ask for the weight's: with two pieces gate rows and up rows."""
    ROWS: gl.constexpr = codes_desc.block_shape[0]
    mbarrier.expect(
        full.index(stage), HALVES * PIECES * codes_desc.block_type.nbytes + WARPGROUPS * x_desc.block_type.nbytes
    )
    for i in gl.static_range(HALVES * PIECES):
        tma.async_copy_global_to_shared(
            codes_desc, [row + i // PIECES * ROWS + i % PIECES * N, step * 128], full.index(stage),
            codes_smem.index(stage * HALVES * PIECES + i),
        )  # fmt: skip


@gluon.jit
def _multiply(
    scale, x_scale, out, x_smem, codes_smem, full, empty, token, num_tokens, n, first, steps,
    WARPGROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUPED: gl.constexpr, SWIGLU: gl.constexpr,
    BLOCK_M: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 tokens. See `_scaled_dense_kernel`."""
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    tokens = token + WARPGROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, QUARTER))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, QUARTER))
    inside = gl.minimum(tokens, num_tokens - 1)
    if PDL:
        wait_for_inputs()
    if GROUPED:
        GROUPS: gl.constexpr = K // 128
        of_rows = scale + n // 128 * GROUPS + first
        q0, q1, q2, q3 = _sums_of_groups(
            of_rows, of_rows + (N // 128 if SWIGLU else HALVES - 1) * GROUPS,
            x_scale + inside.to(gl.int64) * GROUPS + first, x_smem, codes_smem, full, empty, steps, WARPGROUP, SWIGLU,
            BLOCK_M, HALVES, STAGES,
        )  # fmt: skip
    else:
        of_tokens = gl.load(x_scale + inside)[:, None]
        s0 = gl.load(scale + n + columns)[None, :]
        s1 = gl.load(scale + n + (N if SWIGLU else 64) + columns)[None, :]
        low, high = _sums(x_smem, codes_smem, full, empty, steps, WARPGROUP, BLOCK_M, HALVES, STAGES)
        q0, q1 = _quarters(low)
        q0 = q0 * of_tokens * s0
        q1 = q1 * of_tokens * s1
        if HALVES == 2:
            s2 = gl.load(scale + n + (64 if SWIGLU else 128) + columns)[None, :]
            s3 = gl.load(scale + n + (N + 64 if SWIGLU else 192) + columns)[None, :]
            q2, q3 = _quarters(high)
            q2 = q2 * of_tokens * s2
            q3 = q3 * of_tokens * s3
    mask = (tokens < num_tokens)[:, None]
    at = out + tokens.to(gl.int64)[:, None] * N + n + columns[None, :]
    if SWIGLU:
        gl.store(at, activate_gated(q0, q1, "silu").to(out.dtype.element_ty), mask=mask)
        gl.store(at + 64, activate_gated(q2, q3, "silu").to(out.dtype.element_ty), mask=mask)
    else:
        gl.store(at, q0.to(out.dtype.element_ty), mask=mask)
        gl.store(at + 64, q1.to(out.dtype.element_ty), mask=mask)
        if HALVES == 2:
            gl.store(at + 128, q2.to(out.dtype.element_ty), mask=mask)
            gl.store(at + 192, q3.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _sums(
    x_smem, codes_smem, full, empty, steps,
    WARPGROUP: gl.constexpr, BLOCK_M: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """[64, 128] of each half of the rows, without scales; with HALVES 1 the second is 0."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    low = gl.zeros([64, 128], gl.float32, ACC)
    high = gl.zeros([64, 128], gl.float32, ACC)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        x = x_smem.index(stage * (BLOCK_M // 64) + WARPGROUP)
        low = warpgroup_mma(x, codes_smem.index(stage * HALVES).permute((1, 0)), low, is_async=True)
        if HALVES == 2:
            high = warpgroup_mma(x, codes_smem.index(stage * 2 + 1).permute((1, 0)), high, is_async=True)
            low, high = warpgroup_mma_wait(0, deps=[low, high])
        else:
            low = warpgroup_mma_wait(0, deps=[low])
        mbarrier.arrive(empty.index(stage))
    return low, high


@gluon.jit(do_not_specialize=["num_tokens", "part"])
def _scaled_dense_kernel(
    x_desc, codes_desc, scale, x_scale, out, num_tokens, part,
    N: gl.constexpr, K: gl.constexpr, GROUPED: gl.constexpr, SWIGLU: gl.constexpr, BLOCK_M: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A part of out [parts, M, N], of so many steps, from codes x [M, K] and their scales [M, 1], or [M, K / 128] with
    GROUPED.

    The weight has N rows, or 2N with SWIGLU, and scales [rows, 1], or [rows / 128, K / 128].
    """
    PIECES: gl.constexpr = 2 if SWIGLU else 1
    OWN: gl.constexpr = HALVES * 128 // PIECES  # rows of out
    WARPGROUPS: gl.constexpr = BLOCK_M // 64
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    columns = (num_tokens + BLOCK_M - 1) // BLOCK_M
    token = gl.program_id(0) % columns * BLOCK_M
    n = gl.program_id(0) // columns * OWN
    first = gl.program_id(1) * part
    steps = gl.minimum(part, K // 128 - first)
    out += gl.program_id(1).to(gl.int64) * num_tokens * N
    if PDL:
        launch_dependents()
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * WARPGROUPS, 64, 128], TILE)
    codes_boxes = gl.allocate_shared_memory(codes_desc.dtype, [STAGES * HALVES * PIECES, 128 // PIECES, 128], TILE)
    codes_smem = codes_boxes._reinterpret(codes_desc.dtype, [STAGES * HALVES, 128, 128], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    if WARPGROUPS == 1:  # written out twice: Gluon cannot join tuples of constants
        gl.warp_specialize(
            [
                (_multiply, (
                    scale, x_scale, out, x_smem, codes_smem, full, empty, token, num_tokens, n, first, steps,
                    gl.constexpr(0), N, K, GROUPED, SWIGLU, BLOCK_M, HALVES, STAGES, PDL,
                )),
                (_bring, (
                    x_desc, codes_desc, x_smem, codes_boxes, full, empty, token, n, first, steps,
                    N, PIECES, HALVES, WARPGROUPS, STAGES, PDL,
                )),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    scale, x_scale, out, x_smem, codes_smem, full, empty, token, num_tokens, n, first, steps,
                    gl.constexpr(0), N, K, GROUPED, SWIGLU, BLOCK_M, HALVES, STAGES, PDL,
                )),
                (_multiply, (
                    scale, x_scale, out, x_smem, codes_smem, full, empty, token, num_tokens, n, first, steps,
                    gl.constexpr(1), N, K, GROUPED, SWIGLU, BLOCK_M, HALVES, STAGES, PDL,
                )),
                (_bring, (
                    x_desc, codes_desc, x_smem, codes_boxes, full, empty, token, n, first, steps,
                    N, PIECES, HALVES, WARPGROUPS, STAGES, PDL,
                )),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


class Config(NamedTuple):
    """Tile sizes; see `_scaled_dense_kernel`."""

    block_m: int
    part: int  # steps of a program
    stages: int
    halves: int = 2  # of 128 rows of the weight


MAX_PARTS = 5  # of split-K: more take longer to add up


def config(block_m: int, steps: int, parts: int, halves: int) -> Config:
    """Return a division of `steps` steps of 128 channels into about `parts` parts of split-K, with as many stages as
    fit.
    """
    parts = max(min(parts, steps // 4, MAX_PARTS), 1)
    return Config(block_m, cdiv(steps, parts), min(SHARED_BYTES // ((halves * 128 + block_m) * 128), 8), halves)


def supports(x: Tensor | QuantizedRows, weight: QuantizedWeight) -> bool:
    """Return whether `multiply` computes tokens like x, quantised, times the weight."""
    return (
        weight.kind == "e4m3"
        and (weight.group == weight.rows == GROUP or (weight.scale.shape[1] == weight.rows == 1))
        and weight.scale.dtype == torch.float32
        and weight.scale.is_contiguous()
        and len(weight) % 256 == weight.num_channels % 128 == 0
        and x.dtype == torch.bfloat16
        and is_hopper(x.device)
    )


def multiply(x: QuantizedRows, weight: QuantizedWeight, config: Config, *, swiglu: bool = False) -> Tensor:
    """x [M, K] times the weight, or SwiGLU of that, in parts [P, M, N], which are yet to be added up."""
    num_tokens, n = len(x), len(weight) // (2 if swiglu else 1)
    steps = weight.num_channels // 128
    assert x.codes.is_contiguous()
    assert x.scale.is_contiguous()
    assert not (swiglu and (config.part < steps or config.halves < 2))
    parts = torch.empty(cdiv(steps, config.part), num_tokens, n, dtype=x.dtype, device=x.device)
    tiles = cdiv(num_tokens, config.block_m) * (len(weight) // (config.halves * 128))
    _scaled_dense_kernel[(tiles, len(parts))](
        box_descriptor(x.codes, 64, 128), box_descriptor(weight.codes, 64 if swiglu else 128, 128), weight.scale,
        x.scale, parts, num_tokens, config.part, N=n, K=weight.num_channels, GROUPED=weight.rows == GROUP,
        SWIGLU=swiglu, BLOCK_M=config.block_m, HALVES=config.halves, STAGES=config.stages, num_warps=4,
        **pdl_options(x.device),
    )  # fmt: skip
    return parts
