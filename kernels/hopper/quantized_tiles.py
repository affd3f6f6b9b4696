"""Products of tens to hundreds of tokens with matrices of few bits on Hopper's matrix unit, in Gluon.

A program multiplies BLOCK_N rows of the weight by BLOCK_M tokens. Codes and x come by the tensor memory accelerator, STAGES
steps ahead. Codes become bfloat16 in the registers from which the matrix unit takes them, while it still multiplies those of
the step before; x is taken from shared memory. Of codes of four bits, a byte holds channels j and j + K / 2: so a step has
two pieces of x. Scales of groups are multiplied to the weights, those of rows to the sums.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

import functools
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.hopper.code_bits import decode_pairs, scale_of
from kernels.quantized_weight import QuantizedWeight
from kernels.triton.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.triton.parts import sum_parts


@gluon.constexpr_function
def _pairs_layout(warps):
    """Of pairs of codes [16 · warps, 32]: to each thread those that it is to have in the operand of the matrix unit."""
    registers = [[8, 0], [0, 4], [0, 8], [0, 16]]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << i, 0] for i in range(warps.bit_length() - 1)], [], [16 * warps, 32]
    )


@gluon.jit
def _ask(
    x_desc, codes_desc, x_smem, codes_smem, full, step, first, token, row,
    N: gl.constexpr, BYTES: gl.constexpr, HALVES: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr, X: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Ask for the codes of this part's step, which begins at step `first`, or its channels of x, or both."""
    stage = step % STAGES
    if CODES:
        mbarrier.expect(full.index(stage), PIECES * codes_desc.block_type.nbytes + HALVES * BLOCK_M * 64 * 2)
        for i in gl.static_range(PIECES):
            tma.async_copy_global_to_shared(
                codes_desc, [i * N + row, (first + step) * 32], full.index(stage), codes_smem.index(stage * PIECES + i)
            )
    if X:
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                x_desc,
                [token, half * BYTES + (first + step) * 64],
                full.index(stage),
                x_smem.index(stage * HALVES + half),
            )


@gluon.jit
def _rows(row, N: gl.constexpr, BLOCK_N: gl.constexpr, OWN: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's rows of a tile: OWN from `row` on, and as many N further on. Those that do not exist are the last."""
    i = gl.arange(0, BLOCK_N, layout=LAYOUT)
    return i // OWN * N + gl.minimum(row + i % OWN, N - 1)


@gluon.jit
def _weights(
    codes_smem, stage, step, scale_pointers, zero_pointers,
    BYTES: gl.constexpr, GROUP: gl.constexpr, BY_GROUP: gl.constexpr, HALVES: gl.constexpr, KIND: gl.constexpr,
    GROUPED: gl.constexpr, ZERO: gl.constexpr, A: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """One step's weights: of the low (or only) codes, and of the high ones."""
    low, high = decode_pairs(codes_smem.index(stage).load(PAIRS), KIND, A)
    if ZERO:
        low = low - gl.load(zero_pointers + step * 64 // GROUP * BY_GROUP).to(gl.bfloat16)[:, None]
    if GROUPED:
        low = low * scale_of(gl.load(scale_pointers + step * 64 // GROUP * BY_GROUP)).to(gl.bfloat16)[:, None]
    if HALVES == 2:
        if ZERO:
            high = high - gl.load(zero_pointers + (BYTES + step * 64) // GROUP * BY_GROUP).to(gl.bfloat16)[:, None]
        if GROUPED:
            high = (
                high
                * scale_of(gl.load(scale_pointers + (BYTES + step * 64) // GROUP * BY_GROUP)).to(gl.bfloat16)[:, None]
            )
    return low, high


@gluon.jit(do_not_specialize=["num_tokens"])
def _tiles_quantized_kernel(
    x_desc, codes_desc, scale, zero, factor, bias, residual, out, num_tokens,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    BY_ROW: gl.constexpr, BY_GROUP: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, SWIGLU: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and codes of N rows, or of 2N with SWIGLU: gate, then up; plus `residual` with RESIDUAL.

    With PARTS > 1, out is [PARTS, M, N] float32: the sums over as many parts of the channels.
    """
    BYTES: gl.constexpr = K // HALVES
    STEPS: gl.constexpr = BYTES // 64
    PART: gl.constexpr = (STEPS + PARTS - 1) // PARTS
    GROUPED: gl.constexpr = GROUP < K
    WARPS: gl.constexpr = BLOCK_N // 16
    PIECES: gl.constexpr = 2 if SWIGLU else 1
    OWN: gl.constexpr = BLOCK_N // PIECES  # rows of out
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    PAIRS: gl.constexpr = _pairs_layout(WARPS)
    X_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    CODES_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    SUMS: gl.constexpr = gl.BlockedLayout([8, 1, PIECES], [OWN // 8, 256 // OWN, 1], [1, WARPS, 1], [2, 0, 1])
    OUT: gl.constexpr = gl.SliceLayout(2, SUMS)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, BLOCK_M, 64], X_TILE)
    codes_smem = gl.allocate_shared_memory(gl.int16, [STAGES * PIECES, OWN, 32], CODES_TILE)
    both_smem = codes_smem._reinterpret(gl.int16, [STAGES, BLOCK_N, 32], CODES_TILE) if SWIGLU else codes_smem
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    num_m = gl.cdiv(num_tokens, BLOCK_M)
    token = gl.program_id(0) % num_m * BLOCK_M
    row = gl.program_id(0) // num_m * OWN
    if PDL:
        launch_dependents()
    first = gl.program_id(1) * PART
    steps = gl.minimum(STEPS - first, PART)
    for i in gl.static_range(STAGES):
        if i < steps:
            _ask(
                x_desc, codes_desc, x_smem, codes_smem, full, i, first, token, row,
                N, BYTES, HALVES, BLOCK_M, STAGES, PIECES, False, True,
            )  # fmt: skip
    if PDL:
        wait_for_inputs()
    for i in gl.static_range(STAGES):
        if i < steps:
            _ask(
                x_desc, codes_desc, x_smem, codes_smem, full, i, first, token, row,
                N, BYTES, HALVES, BLOCK_M, STAGES, PIECES, True, False,
            )  # fmt: skip

    a_rows = _rows(row, N, BLOCK_N, OWN, gl.SliceLayout(1, A))
    scale_pointers = scale + a_rows // ROWS * BY_ROW
    zero_pointers = zero + a_rows * BY_ROW
    sums = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC))
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        low, high = _weights(
            both_smem, stage, first + step, scale_pointers, zero_pointers,
            BYTES, GROUP, BY_GROUP, HALVES, KIND, GROUPED, ZERO, A, PAIRS,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[sums])
        if (step > 0) & (step - 1 + STAGES < steps):
            _ask(
                x_desc, codes_desc, x_smem, codes_smem, full, step - 1 + STAGES, first, token, row,
                N, BYTES, HALVES, BLOCK_M, STAGES, PIECES, True, True,
            )  # fmt: skip
        sums = warpgroup_mma(low, x_smem.index(stage * HALVES).permute((1, 0)), acc, is_async=True)
        if HALVES == 2:
            sums = warpgroup_mma(high, x_smem.index(stage * HALVES + 1).permute((1, 0)), sums, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[sums])

    rows = _rows(row, N, BLOCK_N, OWN, gl.SliceLayout(1, ACC))
    if not GROUPED:
        acc *= scale_of(gl.load(scale + rows // ROWS))[:, None]
    if FACTOR:
        acc *= gl.load(factor + rows)[:, None]
    if BIAS:
        acc += gl.load(bias + rows).to(gl.float32)[:, None]
    n = row + gl.arange(0, OWN, layout=gl.SliceLayout(1, OUT))[:, None]
    m = token + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))[None, :]
    at = m.to(gl.int64) * N + n
    mask = (m < num_tokens) & (n < N)
    out += gl.program_id(1).to(gl.int64) * num_tokens * N
    if SWIGLU:
        gate, up = gl.split(gl.convert_layout(acc.reshape([2, OWN, BLOCK_M]).permute([1, 2, 0]), SUMS))
        result = gate / (1.0 + gl.exp(-gate)) * up
    else:
        result = gl.convert_layout(acc, OUT)
    if RESIDUAL:
        result += gl.load(residual + at, mask=mask, other=0.0).to(gl.float32)
    gl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


SHARED_BYTES = 224_000  # of a multiprocessor
MAX_TOKENS = 512  # more are multiplied faster by cuBLAS, once the matrix is written out as floats


class Config(NamedTuple):
    """How a product is cut up; see `_tiles_quantized_kernel`."""

    block_n: int
    block_m: int
    stages: int
    parts: int = 1


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _choose(num_tokens: int, n: int, row_bytes: int, halves: int, swiglu: bool) -> Config:
    """As many programs as some 132 multiprocessors hold, one or two each, whose memory they fill."""
    block_m = min(max(next_power_of_2(num_tokens), 32), 128)
    columns, rows = cdiv(num_tokens, block_m), 2 * n if swiglu else n
    block_n = 128 if swiglu or columns * cdiv(rows, 128) >= 200 else 64
    tiles = columns * cdiv(rows, block_n)
    parts = 1 if swiglu else max(min(264 // tiles, 4, row_bytes // 512), 1)
    room = SHARED_BYTES if tiles * parts <= 132 else SHARED_BYTES // 2
    return Config(block_n, block_m, min(room // (block_n * 64 + halves * block_m * 128), 10), parts)


def config(x: Tensor, weight: QuantizedWeight, swiglu: bool = False) -> Config | None:
    """How to multiply x [M, K] by the weight; None where this kernel does not apply."""
    num_bytes = weight.codes.shape[1]
    if (
        len(x) <= MAX_TOKENS
        and x.dtype == torch.bfloat16
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.order is None
        and weight.kind != "e2m1"  # whose bits four bytes share; `decode_pairs` takes two
        and num_bytes % 64 == 0
        and (weight.scale.shape[1] == 1 or weight.group % 64 == 0)
        and _is_hopper(x.device)
    ):
        return _choose(
            len(x), len(weight) // (2 if swiglu else 1), num_bytes, 2 if num_bytes < weight.num_channels else 1, swiglu
        )
    return None


def _boxes(tensor: Tensor, rows: int, swizzle: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, swizzle // 2], layout)


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
    """x [M, K] → out [M, N], plus `residual`, which lies in memory as out does; see `config`."""
    num_tokens, n = out.shape
    codes, split = weight.codes.view(torch.int16), config.parts > 1
    assert not (split and swiglu)
    own = config.block_n // (2 if swiglu else 1)
    scale = weight.scale.view(torch.uint8) if weight.scale.dtype == torch.float8_e4m3fn else weight.scale
    sums = torch.empty(config.parts, num_tokens, n, dtype=torch.float32, device=x.device) if split else out
    _tiles_quantized_kernel[(cdiv(num_tokens, config.block_m) * cdiv(n, own), config.parts)](
        _boxes(x, config.block_m, 128), _boxes(codes, own, 64), scale,
        scale if weight.zero is None else weight.zero, scale if weight.factor is None else weight.factor,
        out if bias is None else bias, out if residual is None else residual, sums, num_tokens, N=n, K=weight.num_channels,
        KIND=weight.kind, GROUP=weight.group, ROWS=weight.rows, BY_ROW=scale.stride(0), BY_GROUP=scale.stride(1),
        HALVES=2 if weight.codes.shape[1] < weight.num_channels else 1, ZERO=weight.zero is not None,
        FACTOR=weight.factor is not None, BIAS=bias is not None and not split, RESIDUAL=residual is not None and not split,
        SWIGLU=swiglu, BLOCK_N=config.block_n, BLOCK_M=config.block_m, STAGES=config.stages, PARTS=config.parts,
        num_warps=config.block_n // 16, **pdl_options(x.device),
    )  # fmt: skip
    if split:
        sum_parts(sums, out, bias=bias, residual=residual)
