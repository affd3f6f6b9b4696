"""GEMMs of up to 16 tokens with low-bit weights, in Gluon, with the norm before and the SwiGLU or sum after them.

As in `kernels.gluon.linear.small_batch`, a thread loads the codes of a row straight into the registers from which the
tensor core takes them, and the channels of the tokens in the same order; between the two, codes become bfloat16 by
arithmetic on bits, two at a time. Of codes of four bits, a byte holds channels j and j + K / 2: so a load gives two
operands, for two pieces of x. Scales of groups are applied to the sums of their channels, those of rows at the end.
"""

# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef,var-annotated"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.data.fusion import Fusion
from kernels.data.quantized_weight import QuantizedWeight
from kernels.gluon.common.activation import activate
from kernels.gluon.common.code_bits import decode_words, scale_of
from kernels.gluon.common.inverse_rms import inverse_rms
from kernels.gluon.common.layouts import last, middle, warps
from kernels.gpu.device import has_tensor_cores, num_multiprocessors
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs


@gluon.constexpr_function
def _word_layout(warps, rows, words):
    """Layout of words of codes [warps, rows, words]: each of four threads of a row has a part."""
    registers = [[0, 0, 1 << i] for i in range((words // 4).bit_length() - 1)]
    registers += [[0, 8 << i, 0] for i in range((rows // 8).bit_length() - 1)]
    lanes = [[0, 0, words // 4], [0, 0, words // 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    each_warp = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, each_warp, [], [warps, rows, words])


@gluon.constexpr_function
def _x_layout(warps, channels, tokens):
    """Layout of x [warps, channels, tokens]: each of four threads of a token has a part."""
    registers = [[0, 1 << i, 0] for i in range((channels // 4).bit_length() - 1)]
    registers += [[0, 0, 8 << i] for i in range((tokens // 8).bit_length() - 1)]
    lanes = [[0, channels // 4, 0], [0, channels // 2, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    each_warp = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, each_warp, [], [warps, channels, tokens])


@gluon.jit
def _add_products(
    total, packed, x_low, x_high, scales, zeros,
    SHAPE: gl.constexpr, MMA: gl.constexpr, W: gl.constexpr, X: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr,
    PARTS: gl.constexpr, GROUPED: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """total + the products of one step's codes and channels, which belong to PARTS groups."""
    codes = decode_words(packed, KIND, W)
    CHUNK: gl.constexpr = x_low.shape[1]
    place = middle(X, CHUNK)
    group = (place // 8 % 4 * (CHUNK // 4) + place // 32 * 8) // (CHUNK // PARTS)  # see `_arranged`
    for half in gl.static_range(HALVES):
        x = x_high if half == 1 else x_low
        for part in gl.static_range(PARTS):
            w = codes[half]
            if ZERO:
                w = w - zeros[half * PARTS + part].to(gl.bfloat16)[:, :, None]
            own = x if PARTS == 1 else gl.where(group == part, x, gl.zeros_like(x))
            if GROUPED:
                products = mma_v2(w, own, gl.zeros(SHAPE, gl.float32, MMA))
                total += products * scale_of(scales[half * PARTS + part])[:, :, None]
            else:
                total = mma_v2(w, own, total)
    return total


@gluon.jit
def _load_step(
    code_pointers, scale_pointers, zero_pointers, warps, z_warps, i,
    BYTES: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, GROUP: gl.constexpr, BY_GROUP: gl.constexpr,
    HALVES: gl.constexpr, PARTS: gl.constexpr, GROUPED: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """The codes of one step, and the scales and zero points of their groups."""
    packed = gl.load(code_pointers + i * STEP // 4, eviction_policy="evict_first")
    scales = ()
    zeros = ()
    for half in gl.static_range(HALVES):
        for part in gl.static_range(PARTS):
            if GROUPED:
                group = (half * BYTES + i * STEP + warps * CHUNK) // GROUP + part
                scales = scales + (gl.load(scale_pointers + group * BY_GROUP),)
            if ZERO:
                group = (half * BYTES + i * STEP + z_warps * CHUNK) // GROUP + part
                zeros = zeros + (gl.load(zero_pointers + group * BY_GROUP),)
    return packed, scales, zeros


@gluon.jit
def _arranged(x, X: gl.constexpr):
    """Channels of the tokens in the order of the codes."""
    WARPS: gl.constexpr = x.shape[0]
    NUM: gl.constexpr = x.shape[1]
    TOKENS: gl.constexpr = x.shape[2]
    pieces = x.reshape([WARPS, 4, NUM // 32, 8, TOKENS]).permute([0, 2, 1, 3, 4])
    return gl.convert_layout(pieces.reshape([WARPS, NUM, TOKENS]), X)


@gluon.jit
def _load_x(pointers, g_pointers, NORM: gl.constexpr, X: gl.constexpr):
    """Channels of the tokens, times the norm's weight."""
    x = gl.load(pointers)
    if NORM:
        x = x * gl.load(g_pointers)
    return _arranged(x, X)


@gluon.jit
def _code_pointers(
    codes, tile, N: gl.constexpr, BYTES: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, WARPS: gl.constexpr,
    WORDS: gl.constexpr,
):  # fmt: skip
    """Pointers to a tile's words of four bytes, in layout WORDS."""
    first = tile * BLOCK_N
    rows = gl.minimum(middle(WORDS, BLOCK_N), N - 1 - first)
    columns = warps(WORDS, WARPS) * (CHUNK // 4) + last(WORDS, CHUNK // 4)
    return codes + first.to(gl.int64) * (BYTES // 4) + rows * (BYTES // 4) + columns


@gluon.jit
def _group_pointers(
    values, tile, N: gl.constexpr, ROWS: gl.constexpr, BY_ROW: gl.constexpr, BLOCK_N: gl.constexpr, L: gl.constexpr
):
    """Pointers to the rows' first scales or zero points, in layout L."""
    rows = gl.minimum(tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, L)), N - 1)[None, :]
    return values + rows // ROWS * BY_ROW


@gluon.jit(do_not_specialize=["num_tokens"])
def _few_quantized_kernel(
    x, codes, scale, zero, factor, bias, norm_weight, residual, out, eps, num_tokens, stride_x, stride_out,
    N: gl.constexpr, K: gl.constexpr, M: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    BY_ROW: gl.constexpr, BY_GROUP: gl.constexpr, HALVES: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr,
    BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr, KEEP_X: gl.constexpr,
    NORM: gl.constexpr, SWIGLU: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and codes of N rows, or of 2N with SWIGLU: gate rows, then up rows.

    A program takes one tile of BLOCK_N rows after another, and asks for the next one's codes before it is done with
    one. A warp takes CHUNK bytes of codes at a time. Weights are the rows of the tensor core's tile and tokens its
    columns. Rows of the tile beyond the tokens (or the weight) repeat the last one, and are not stored. KEEP_X: x stays
    in registers.
    """
    BYTES: gl.constexpr = K // HALVES
    STEP: gl.constexpr = CHUNK * WARPS
    STEPS: gl.constexpr = BYTES // STEP
    GROUPED: gl.constexpr = GROUP < K
    PARTS: gl.constexpr = CHUNK // GROUP if GROUP < CHUNK else 1
    TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    WORDS: gl.constexpr = _word_layout(WARPS, BLOCK_N, CHUNK // 4)
    PIECES: gl.constexpr = _x_layout(WARPS, CHUNK, M)
    S: gl.constexpr = gl.SliceLayout(2, MMA)
    Z: gl.constexpr = gl.SliceLayout(2, W)
    SHAPE: gl.constexpr = [WARPS, BLOCK_N, M]
    LANES: gl.constexpr = 32 // M
    SUM: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, LANES, M], [1, WARPS, 1], [2, 1, 0])
    ROWS_OF_SUM: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SUM))
    TOKENS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, SUM))
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    if PDL:
        launch_dependents()
    s_warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, S))[:, None]
    z_warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, Z))[:, None]
    x_channels = warps(PIECES, WARPS) * CHUNK + middle(PIECES, CHUNK)
    x_pointers = x + gl.minimum(last(PIECES, M), num_tokens - 1) * stride_x + x_channels
    g_pointers = norm_weight + x_channels
    rows_of_sum = gl.arange(0, BLOCK_N, layout=ROWS_OF_SUM)[:, None]
    m = gl.arange(0, M, layout=TOKENS)[None, :]

    w_here = _code_pointers(codes, program, N, BYTES, BLOCK_N, CHUNK, WARPS, WORDS)
    s_here = _group_pointers(scale, program, N, ROWS, BY_ROW, BLOCK_N, S)
    z_here = _group_pointers(zero, program, N, 1, BY_ROW, BLOCK_N, Z)
    UP_SCALES: gl.constexpr = N // ROWS * BY_ROW
    ahead = ()
    ups = ()
    for i in gl.static_range(AHEAD):
        ahead = ahead + (
            _load_step(
                w_here,
                s_here,
                z_here,
                s_warps,
                z_warps,
                i,
                BYTES,
                STEP,
                CHUNK,
                GROUP,
                BY_GROUP,
                HALVES,
                PARTS,
                GROUPED,
                ZERO,
            ),
        )
        if SWIGLU:
            ups = ups + (
                _load_step(
                    w_here + N * BYTES // 4, s_here + UP_SCALES, z_here + N * BY_ROW, s_warps, z_warps, i,
                    BYTES, STEP, CHUNK, GROUP, BY_GROUP, HALVES, PARTS, GROUPED, ZERO,
                ),
            )  # fmt: skip
    gs = ()
    kept = ()
    if KEEP_X and NORM:
        for i in gl.static_range(STEPS * HALVES):
            gs = gs + (gl.load(g_pointers + i % HALVES * BYTES + i // HALVES * STEP),)
    if PDL:
        wait_for_inputs()
    if KEEP_X:
        for i in gl.static_range(STEPS * HALVES):
            kept = kept + (gl.load(x_pointers + i % HALVES * BYTES + i // HALVES * STEP),)
    if NORM:
        norm = inverse_rms(x, eps, num_tokens, stride_x, K, M, WARPS, TOKENS)[None, :]
    if KEEP_X:
        for i in gl.static_range(STEPS * HALVES):
            xi = kept[0] * gs[i] if NORM else kept[0]
            kept = kept[1:] + (_arranged(xi, X),)
    total_smem = gl.allocate_shared_memory(gl.float32, SHAPE, SHARED)
    if SWIGLU:
        up_smem = gl.allocate_shared_memory(gl.float32, SHAPE, SHARED)
    for tile in range(program, TILES, num_programs):
        following = gl.minimum(tile + num_programs, TILES - 1)
        w_next = _code_pointers(codes, following, N, BYTES, BLOCK_N, CHUNK, WARPS, WORDS)
        s_next = _group_pointers(scale, following, N, ROWS, BY_ROW, BLOCK_N, S)
        z_next = _group_pointers(zero, following, N, 1, BY_ROW, BLOCK_N, Z)
        n = tile * BLOCK_N + rows_of_sum
        row = gl.minimum(n, N - 1)
        at_out = m * stride_out + n
        mask = (m < num_tokens) & (n < N)
        if not GROUPED:
            row_scale = scale_of(gl.load(scale + row // ROWS))
            if SWIGLU:
                up_scale = scale_of(gl.load(scale + (N + row) // ROWS))
        if FACTOR:
            row_factor = gl.load(factor + row)
            if SWIGLU:
                up_factor = gl.load(factor + N + row)
        if BIAS:
            b = gl.load(bias + row).to(gl.float32)
            if SWIGLU:
                b_up = gl.load(bias + N + row).to(gl.float32)
        if RESIDUAL:
            before = gl.load(residual + at_out, mask=mask, other=0.0)
        total = gl.zeros(SHAPE, gl.float32, MMA)
        up_total = gl.zeros(SHAPE, gl.float32, MMA)
        for i in gl.static_range(STEPS):
            step = ahead[0]
            ahead = ahead[1:]
            w_from = w_here if i + AHEAD < STEPS else w_next
            s_from = s_here if i + AHEAD < STEPS else s_next
            z_from = z_here if i + AHEAD < STEPS else z_next
            ahead = ahead + (
                _load_step(
                    w_from, s_from, z_from, s_warps, z_warps, (i + AHEAD) % STEPS,
                    BYTES, STEP, CHUNK, GROUP, BY_GROUP, HALVES, PARTS, GROUPED, ZERO,
                ),
            )  # fmt: skip
            if SWIGLU:
                up_step = ups[0]
                ups = ups[1:]
                ups = ups + (
                    _load_step(
                        w_from + N * BYTES // 4, s_from + UP_SCALES, z_from + N * BY_ROW, s_warps, z_warps,
                        (i + AHEAD) % STEPS, BYTES, STEP, CHUNK, GROUP, BY_GROUP, HALVES, PARTS, GROUPED, ZERO,
                    ),
                )  # fmt: skip
            if KEEP_X:
                low = kept[i * HALVES]
                high = kept[i * HALVES + HALVES - 1]
            else:
                low = _load_x(x_pointers + i * STEP, g_pointers + i * STEP, NORM, X)
                high = low
                if HALVES == 2:
                    high = _load_x(x_pointers + BYTES + i * STEP, g_pointers + BYTES + i * STEP, NORM, X)
            total = _add_products(
                total, step[0], low, high, step[1], step[2], SHAPE, MMA, W, X, KIND, HALVES, PARTS, GROUPED, ZERO
            )
            if SWIGLU:
                up_total = _add_products(
                    up_total,
                    up_step[0],
                    low,
                    high,
                    up_step[1],
                    up_step[2],
                    SHAPE,
                    MMA,
                    W,
                    X,
                    KIND,
                    HALVES,
                    PARTS,
                    GROUPED,
                    ZERO,
                )
        w_here = w_next
        s_here = s_next
        z_here = z_next

        total_smem.store(total)
        if SWIGLU:
            up_smem.store(up_total)
        result = gl.sum(total_smem.load(SUM), 0)
        if SWIGLU:
            up = gl.sum(up_smem.load(SUM), 0)
        if not GROUPED:
            result *= row_scale
            if SWIGLU:
                up *= up_scale
        if FACTOR:
            result *= row_factor
            if SWIGLU:
                up *= up_factor
        if NORM:
            result *= norm
            if SWIGLU:
                up *= norm
        if BIAS:
            result += b
            if SWIGLU:
                up += b_up
        if SWIGLU:
            result = activate(result, "silu") * up
        if RESIDUAL:
            result += before.to(gl.float32)
        gl.store(out + at_out, result.to(out.dtype.element_ty), mask=mask)


class Config(NamedTuple):
    """Tile sizes; see `_few_quantized_kernel`. CHUNK times the warps must divide the bytes of a row."""

    block_n: int
    warps: int
    chunk: int
    ahead: int
    per_sm: int = 1  # programs of a multiprocessor
    keep_x: bool = False
    max_registers: int | None = None  # of a thread


@functools.cache
def _choose(n: int, row_bytes: int, k: int, group: int, num_groups: int, m: int, swiglu: bool) -> Config | None:
    """x in registers where it fits into those of 16 warps; a step of a warp in few groups."""
    if row_bytes == k and m == 8 and (num_groups == 1 or group % 128 == 0):
        if swiglu and k % (16 * 128) == 0 and k <= 4096:
            return Config(16, 16, 128, 1, per_sm=1, keep_x=True, max_registers=128)
        if k > 8192 and k % (8 * 128) == 0:
            return Config(16, 8, 128, 1, per_sm=2, max_registers=128)
    chunk = 64 if num_groups == 1 or group % 64 == 0 else 32  # 64 bytes of several groups are slower
    chunks = row_bytes // chunk
    if row_bytes % chunk or (num_groups > 1 and group % chunk and chunk % group):
        return None
    if group < 32 and row_bytes < k:  # four bits in groups of 16: not yet measured
        return None
    if chunks % 16 == 0 and k * m <= 16 * 4096:
        ahead = min(1 if row_bytes < k else 2, chunks // 16)
        return Config(16, 16, chunk, ahead, per_sm=1, keep_x=True, max_registers=128)
    if chunks % 16 == 0 and row_bytes < k:
        return Config(16, 16, chunk, 1, per_sm=1, max_registers=128)
    warps = min(chunks & -chunks, 8)
    return Config(16, warps, chunk, min(2, chunks // warps), per_sm=2, max_registers=128)


def config(x: Tensor, weight: QuantizedWeight, swiglu: bool) -> Config | None:
    """Return how to compute x [M, K], M <= 16, times the weight; None where `launch` cannot: see
    `small_batch.supports`.
    """
    if (
        x.dtype == torch.bfloat16
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.order is None
        and (not swiglu or len(weight) // 2 % weight.rows == 0)
        and has_tensor_cores(x.device)
    ):
        m = max(next_power_of_2(x.shape[0]), 8)
        num_bytes = weight.codes.shape[1]
        return _choose(len(weight), num_bytes, weight.num_channels, weight.group, weight.scale.shape[1], m, swiglu)
    return None


def launch(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    config: Config,
    fusion: Fusion,
) -> None:
    """Compute x [M, K] -> out [M, N], 1 <= M <= 16, plus `residual`, of the strides of `out`; see `config`."""
    norm_weight, eps, gate, residual, _ = fusion
    num_tokens, n = x.shape[0], out.shape[1]
    assert gate in (None, "silu")
    codes = weight.codes.view(torch.int32)
    scale = weight.scale.view(torch.uint8) if weight.scale.dtype == torch.float8_e4m3fn else weight.scale
    assert x.stride(1) == out.stride(1) == 1
    assert weight.zero is None or weight.zero.stride() == scale.stride()
    num_programs = min(cdiv(n, config.block_n), config.per_sm * num_multiprocessors(x.device))
    _few_quantized_kernel[(num_programs,)](
        x, codes, scale, scale if weight.zero is None else weight.zero,
        scale if weight.factor is None else weight.factor, x if bias is None else bias,
        x if norm_weight is None else norm_weight, out if residual is None else residual, out, eps, num_tokens,
        x.stride(0), out.stride(0), N=n, K=weight.num_channels, M=max(next_power_of_2(num_tokens), 8), KIND=weight.kind,
        GROUP=weight.group, ROWS=weight.rows, BY_ROW=scale.stride(0), BY_GROUP=scale.stride(1),
        HALVES=2 if weight.codes.shape[1] < weight.num_channels else 1, ZERO=weight.zero is not None,
        FACTOR=weight.factor is not None, BLOCK_N=config.block_n, CHUNK=config.chunk, AHEAD=config.ahead,
        WARPS=config.warps, KEEP_X=config.keep_x,
        NORM=norm_weight is not None, SWIGLU=gate is not None, BIAS=bias is not None, RESIDUAL=residual is not None,
        num_warps=config.warps, maxnreg=config.max_registers, **pdl_options(x.device),
    )  # fmt: skip
