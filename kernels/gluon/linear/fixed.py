"""GEMM of many tokens and a float weight with one order of sums, in Gluon: deterministic mode's on Hopper.

The order is that of `kernels.triton.fixed_parts`: channels one after the other, in pieces whose float32 sums a fixed
tree adds up. A program stays on its multiprocessor and takes one tile after another. One warp asks for its tokens and
rows, stages ahead and beyond the tile's end, and for the first rows before the tokens are there. Each of one or two
warpgroups multiplies 64 tokens by 128 rows, or 256.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from typing import Literal, NamedTuple

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

from kernels.data.activation import Gate
from kernels.gluon.common.activation import activate
from kernels.gluon.common.layouts import box_descriptor, side_by_side
from kernels.gpu.device import is_hopper, num_multiprocessors
from kernels.gpu.launch import cdiv, launch_dependents, pdl_options, wait_for_inputs

ROWS, CHANNELS = 128, 64  # of a box of the weight
SHARED_BYTES = 216 << 10  # of a program
FEWEST_TILES = 96  # fewer leave too many multiprocessors idle
GROUP = 16  # tiles of tokens that are multiplied by the same rows one after the other


@gluon.jit
def _place(tile, num_m, num_n, GROUP: gl.constexpr):
    """Index of a tile's tokens, and of its rows. Programs that run together read few tokens and few rows."""
    group = tile // (GROUP * num_n)
    first = group * GROUP
    height = gl.minimum(num_m - first, GROUP)
    inside = tile % (GROUP * num_n)
    return first + inside % height, inside // height


@gluon.jit
def _ask_weight(
    x_desc, weight_desc, weight_smem, full, stage, n, step,
    SECOND: gl.constexpr, HALVES: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """Expect the bytes of a step, and ask for those of the weight."""
    mbarrier.expect(full.index(stage), HALVES * weight_desc.block_type.nbytes + WARPGROUPS * x_desc.block_type.nbytes)
    for i in gl.static_range(HALVES):
        tma.async_copy_global_to_shared(
            weight_desc, [n + i * SECOND, step * 64], full.index(stage), weight_smem.index(stage * HALVES + i)
        )


@gluon.jit
def _bring(
    x_desc, weight_desc, x_smem, weight_smem, full, empty, num_m, num_n,
    STEPS: gl.constexpr, OWN: gl.constexpr, SECOND: gl.constexpr, HALVES: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Ask for each step's tokens and rows once its stage is empty."""
    EARLY: gl.constexpr = min(STAGES, STEPS)
    program = gl.program_id(0)
    first = _place(program, num_m, num_n, GROUP)[1] * OWN
    for i in gl.static_range(EARLY):
        _ask_weight(x_desc, weight_desc, weight_smem, full, i, first, i, SECOND, HALVES, WARPGROUPS)
    if PDL:
        wait_for_inputs()
    count = 0
    for tile in range(program, num_m * num_n, gl.num_programs(0)):
        m, n = _place(tile, num_m, num_n, GROUP)
        for step in range(STEPS):
            stage = count % STAGES
            if count >= EARLY:
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                _ask_weight(x_desc, weight_desc, weight_smem, full, stage, n * OWN, step, SECOND, HALVES, WARPGROUPS)
            for w in gl.static_range(WARPGROUPS):
                tma.async_copy_global_to_shared(
                    x_desc, [(m * WARPGROUPS + w) * 64, step * 64], full.index(stage),
                    x_smem.index(stage * WARPGROUPS + w),
                )  # fmt: skip
            count += 1


@gluon.jit
def _accumulate(
    x_smem, weight_smem, full, empty, count,
    STEPS: gl.constexpr, WARPGROUP: gl.constexpr, HALVES: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """The sums [64, 128] of so many steps, and of the second half of the rows, else 0. OVERLAPS: a step's products are
    asked for while those before them are computed.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    low = gl.zeros([64, 128], gl.float32, ACC)
    high = low
    if HALVES == 2:
        high = gl.zeros([64, 128], gl.float32, ACC)
    for step in range(STEPS):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        x = x_smem.index(stage * WARPGROUPS + WARPGROUP)
        low = warpgroup_mma(x, weight_smem.index(stage * HALVES).permute((1, 0)), low, is_async=True)
        if HALVES == 2:
            high = warpgroup_mma(x, weight_smem.index(stage * 2 + 1).permute((1, 0)), high, is_async=True)
            low, high = warpgroup_mma_wait(2 if OVERLAPS else 0, deps=[low, high])
        else:
            low = warpgroup_mma_wait(1 if OVERLAPS else 0, deps=[low])
        if OVERLAPS:
            if step > 0:
                mbarrier.arrive(empty.index((count - 1) % STAGES))
        else:
            mbarrier.arrive(empty.index(stage))
        count += 1
    if OVERLAPS:
        if HALVES == 2:
            low, high = warpgroup_mma_wait(0, deps=[low, high])
        else:
            low = warpgroup_mma_wait(0, deps=[low])
        mbarrier.arrive(empty.index((count - 1) % STAGES))
    return low, high, count


@gluon.jit
def _with_bias(total, bias, n, end):
    """Add the bias of columns from n on; columns from `end` on have none."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    columns = n + gl.arange(0, 128, layout=gl.SliceLayout(0, ACC))
    return total + gl.load(bias + columns, mask=columns < end, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _store(
    total, residual, out, token, n, num_tokens, stride_out,
    N: gl.constexpr, RESIDUAL: gl.constexpr, ROUND: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """Store sums [64, 128], plus `residual`, TOGETHER of them at a time."""
    OUT: gl.constexpr = side_by_side(128, TOGETHER)
    total = gl.convert_layout(total, OUT)
    tokens = token + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    columns = n + gl.arange(0, 128, layout=gl.SliceLayout(0, OUT))
    at = tokens.to(gl.int64)[:, None] * stride_out + columns[None, :]
    mask = (tokens < num_tokens)[:, None] & (columns < N)[None, :]
    if ROUND:
        total = total.to(out.dtype.element_ty).to(gl.float32)
    if RESIDUAL:
        total += gl.load(residual + at, mask=mask, other=0.0).to(gl.float32)
    gl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply(
    bias, residual, out, x_smem, weight_smem, four_smem, full, empty, num_tokens, stride_out, num_m, num_n,
    WARPGROUP: gl.constexpr, N: gl.constexpr, STEPS: gl.constexpr, OWN: gl.constexpr, SECOND: gl.constexpr,
    PIECES: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ROUND: gl.constexpr,
    TOGETHER: gl.constexpr,
    HALVES: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    OVERLAPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 tokens of each tile. See `_fixed_many_kernel`."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    if PDL:
        wait_for_inputs()
    count = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = _place(tile, num_m, num_n, GROUP)
        n *= OWN
        token = (m * WARPGROUPS + WARPGROUP) * 64
        total, high, count = _accumulate(
            x_smem, weight_smem, full, empty, count, STEPS // PIECES, WARPGROUP, HALVES, WARPGROUPS, STAGES,
            OVERLAPS,
        )  # fmt: skip
        if BIAS:
            total = _with_bias(total, bias, n, SECOND if GATE != "" else N)
            if HALVES == 2:
                high = _with_bias(high, bias, n + SECOND, 2 * N if GATE != "" else N)
        if PIECES > 1:
            one = total
            two = total
            for piece in range(1, PIECES):
                total, high, count = _accumulate(
                    x_smem, weight_smem, full, empty, count, STEPS // PIECES, WARPGROUP, HALVES, WARPGROUPS, STAGES,
                    OVERLAPS,
                )  # fmt: skip
                if piece % 2 == 0:
                    one = total
                else:
                    total = one + total
                    if piece % 4 == 3:
                        total = two + total
                        if PIECES == 8:  # the registers have no room
                            if piece == 3:
                                four_smem.index(WARPGROUP).store(total)
                            else:
                                total = four_smem.index(WARPGROUP).load(ACC) + total
                    two = total
            total = two
        if GATE != "":
            rounded = total.to(out.dtype.element_ty).to(gl.float32)
            active = activate(rounded, GATE).to(out.dtype.element_ty).to(gl.float32)
            total = active * high.to(out.dtype.element_ty).to(gl.float32)
        _store(total, residual, out, token, n, num_tokens, stride_out, N, RESIDUAL, ROUND, TOGETHER)
        if HALVES == 2 and GATE == "":
            _store(high, residual, out, token, n + 128, num_tokens, stride_out, N, RESIDUAL, ROUND, TOGETHER)


@gluon.jit(do_not_specialize=["num_tokens"])
def _fixed_many_kernel(
    x_desc, weight_desc, bias, residual, out, num_tokens, stride_out,
    N: gl.constexpr, K: gl.constexpr, PIECES: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, ROUND: gl.constexpr, TOGETHER: gl.constexpr, BLOCK_M: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, OVERLAPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and weight [N, K], or [2N, K] with GATE, gate rows, then up rows, whose sums are
    rounded before the activation and after it.

    PIECES: of channels, 1, 2, 4 or 8; only with HALVES 1. RESIDUAL is added to the sums, with ROUND to the rounded
    ones.
    """
    GATED: gl.constexpr = GATE != ""
    OWN: gl.constexpr = 128 if GATED else 128 * HALVES  # columns of a tile
    SECOND: gl.constexpr = N if GATED else 128  # rows between the halves
    STEPS: gl.constexpr = K // 64
    WARPGROUPS: gl.constexpr = BLOCK_M // 64
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    num_m = (num_tokens + BLOCK_M - 1) // BLOCK_M
    num_n = (N + OWN - 1) // OWN
    if PDL:
        launch_dependents()
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * WARPGROUPS, 64, 64], TILE)
    weight_smem = gl.allocate_shared_memory(weight_desc.dtype, [STAGES * HALVES, 128, 64], TILE)
    four_smem = x_smem
    if PIECES == 8:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
        four_smem = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, 64, 128], FLAT)
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
                    bias, residual, out, x_smem, weight_smem, four_smem, full, empty, num_tokens, stride_out, num_m,
                    num_n, gl.constexpr(0), N, STEPS, OWN, SECOND, PIECES, GATE, BIAS, RESIDUAL, ROUND, TOGETHER,
                    HALVES, WARPGROUPS, STAGES, GROUP, OVERLAPS, PDL,
                )),
                (_bring, (
                    x_desc, weight_desc, x_smem, weight_smem, full, empty, num_m, num_n, STEPS, OWN, SECOND, HALVES,
                    WARPGROUPS, STAGES, GROUP, PDL,
                )),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    bias, residual, out, x_smem, weight_smem, four_smem, full, empty, num_tokens, stride_out, num_m,
                    num_n, gl.constexpr(0), N, STEPS, OWN, SECOND, PIECES, GATE, BIAS, RESIDUAL, ROUND, TOGETHER,
                    HALVES, WARPGROUPS, STAGES, GROUP, OVERLAPS, PDL,
                )),
                (_multiply, (
                    bias, residual, out, x_smem, weight_smem, four_smem, full, empty, num_tokens, stride_out, num_m,
                    num_n, gl.constexpr(1), N, STEPS, OWN, SECOND, PIECES, GATE, BIAS, RESIDUAL, ROUND, TOGETHER,
                    HALVES, WARPGROUPS, STAGES, GROUP, OVERLAPS, PDL,
                )),
                (_bring, (
                    x_desc, weight_desc, x_smem, weight_smem, full, empty, num_m, num_n, STEPS, OWN, SECOND, HALVES,
                    WARPGROUPS, STAGES, GROUP, PDL,
                )),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


class Config(NamedTuple):
    """Tile sizes, and whether the tensor core overlaps steps; see `_fixed_many_kernel`."""

    block_m: int
    halves: int
    overlaps: bool = False

    def tiles(self, num_tokens: int, n: int, gated: bool) -> int:
        """Return how many tiles n outputs of each token make."""
        return cdiv(num_tokens, self.block_m) * cdiv(n, ROWS if gated else ROWS * self.halves)


def config(num_tokens: int, n: int, gated: bool, pieces: int) -> Config:
    """Return the largest tile that gives enough tiles, else the smallest."""
    halves = (2,) if gated else (2, 1) if pieces == 1 else (1,)
    found = [Config(128, each) for each in halves] + [Config(64, halves[-1])]
    enough = [each for each in found if each.tiles(num_tokens, n, gated) >= FEWEST_TILES]
    return enough[0] if enough else found[-1]


def supports(x: Tensor, weight: Tensor, out: Tensor, pieces: int) -> bool:
    """Return whether `launch` computes x [M, K] times the weight."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % (pieces * CHANNELS) == len(weight) % ROWS == out.shape[1] % ROWS == 0
        and x.stride(0) % 8 == out.stride(0) % 8 == 0
        and x.data_ptr() % 16 == out.data_ptr() % 16 == 0
        and is_hopper(x.device)
    )


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: Config,
    *,
    residual: Tensor | None = None,
    rounds: bool = False,
    pieces: int = 1,
    gate: Gate | Literal[""] = "",
) -> None:
    """Compute x [M, K] -> out [M, N], plus `residual`, of the strides of `out`; see `supports`.

    rounds: the sums, before the residual is added.
    """
    num_tokens, k = x.shape
    n = out.shape[1]
    assert x.stride(1) == out.stride(1) == 1
    assert weight.is_contiguous()
    assert not (gate and residual is not None)
    assert pieces == 1 or config.halves == 1
    tree = config.block_m * ROWS * 4 if pieces == 8 else 0
    stages = (SHARED_BYTES - tree) // ((config.block_m + config.halves * ROWS) * CHANNELS * 2)
    programs = min(config.tiles(num_tokens, n, gate != ""), num_multiprocessors(x.device))
    _fixed_many_kernel[(programs,)](
        box_descriptor(x, 64, CHANNELS), box_descriptor(weight, ROWS, CHANNELS), weight if bias is None else bias,
        out if residual is None else residual, out, num_tokens, out.stride(0), N=n, K=k, PIECES=pieces, GATE=gate,
        BIAS=bias is not None, RESIDUAL=residual is not None, ROUND=rounds, TOGETHER=16 // out.itemsize,
        BLOCK_M=config.block_m,
        HALVES=config.halves, STAGES=min(stages, 8), GROUP=GROUP, OVERLAPS=config.overlaps,
        num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
