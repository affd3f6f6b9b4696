"""The experts of up to 8 tokens, in Gluon: three kernels, or two for one token.

As in `kernels.gluon.linear.small_batch`, a thread loads the weights of a row straight into the registers from which the
tensor core takes them, low-bit codes as in `kernels.gluon.linear.quantized_small_batch`. A program of the first kernel
multiplies some rows of gate and up of one expert by all tokens that chose it, so each weight is read once; it also
applies the routing weight. Then down is the same GEMM, and a last kernel sums a token's experts. Of a single token,
the GEMMs with its experts' down matrices are one GEMM over the channels of all of them, whose warps find their
expert's weights by its id, and which begins to load while the kernel before it still runs.
"""

# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.gluon.common.activation import activate_gated
from kernels.gluon.common.code_bits import decode_bytes, decode_small, scale_of
from kernels.gluon.common.layouts import last, middle
from kernels.gpu.device import has_tensor_cores
from kernels.gpu.launch import EARLY, cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs

NO_PAIR = gl.constexpr(1 << 30)


@gluon.jit
def _chunks(
    LAYOUT: gl.constexpr, ids, first, i,
    E: gl.constexpr, WARPS: gl.constexpr, PER_EXPERT: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    """For each warp at step i: local expert id, position in top-k, chunk index, valid flag.

    The local expert id is 0 where pointers are one expert's.
    """
    return _of_chunk(i * WARPS + gl.arange(0, WARPS, layout=LAYOUT), ids, first, E, PER_EXPERT, EXPERTS)


@gluon.jit
def _of_chunk(chunk, ids, first, E: gl.constexpr, PER_EXPERT: gl.constexpr, EXPERTS: gl.constexpr):
    """See `_chunks`."""
    real = chunk < EXPERTS * PER_EXPERT
    choice = chunk * 0
    local = choice
    if EXPERTS > 1:
        choice = chunk // PER_EXPERT
        chunk = chunk % PER_EXPERT
        local = gl.load(ids + choice, mask=real, other=-1) - first
        real = real & (local >= 0) & (local < E)
    return local, choice, chunk, real


@gluon.jit
def routed_tokens(
    ids, own, first, num_tokens,
    E: gl.constexpr, M: gl.constexpr, CHOSEN: gl.constexpr, CHOICES: gl.constexpr, ONE_TOKEN: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Local expert id of routed token `own`, whether this program computes that expert, each token's routed token of
    it.

    The expert's first routed token's program does. A token without a routed token of the expert has -1.
    """
    expert = gl.load(ids + own, cache_modifier=EARLY) - first
    mine = (expert >= 0) & (expert < E)
    if ONE_TOKEN:
        return expert, mine, own
    else:
        IDS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // CHOICES, CHOICES], [WARPS, 1], [1, 0])
        tokens = gl.arange(0, M, layout=gl.SliceLayout(1, IDS))[:, None]
        choices = gl.arange(0, CHOICES, layout=gl.SliceLayout(0, IDS))[None, :]
        pairs = tokens * CHOSEN + choices
        real = (tokens < num_tokens) & (choices < CHOSEN)
        listed = gl.load(ids + pairs, mask=real, other=-1, cache_modifier=EARLY) - first
        mine = mine & (gl.min(gl.min(gl.where(listed == expert, pairs, NO_PAIR), 1), 0) == own)
        return expert, mine, gl.max(gl.where(listed == expert, pairs, -1), 1)


@gluon.jit
def columns(
    pair_of, own, COLUMNS: gl.constexpr, TOKENS: gl.constexpr,
    M: gl.constexpr, GATED: gl.constexpr, EXPERTS: gl.constexpr, ONE_TOKEN: gl.constexpr,
):  # fmt: skip
    """Each column's row of x and whether it has one, in layout COLUMNS; its routed token or -1, in layout TOKENS."""
    column = gl.arange(0, M, layout=COLUMNS)
    m = gl.arange(0, M, layout=TOKENS)
    if ONE_TOKEN:
        x_pair = gl.where(column == 0, own, -1)
        pair = gl.where(m == 0, own, -1)
    else:
        x_pair = gl.convert_layout(pair_of, COLUMNS)
        pair = gl.convert_layout(pair_of, TOKENS)
    if GATED:
        x_row = column
    elif EXPERTS > 1:
        x_row = column * 0
    else:
        x_row = gl.maximum(x_pair, 0)
    return x_row, x_pair >= 0, pair


@gluon.jit
def _load(pointers, real, MASKED: gl.constexpr):
    if MASKED:
        return gl.load(pointers, mask=real, other=0, eviction_policy="evict_first")
    else:
        return gl.load(pointers, eviction_policy="evict_first")


@gluon.jit
def _load_step(
    codes, scale, zero, factor, ids, row, first, i, W: gl.constexpr, S: gl.constexpr, Z: gl.constexpr,
    E: gl.constexpr, STORED: gl.constexpr, BYTES: gl.constexpr, PANEL: gl.constexpr, CHUNK: gl.constexpr,
    WARPS: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr,
    HALVES: gl.constexpr, EXPERTS: gl.constexpr, QUANTIZED: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr,
    STAGED: gl.constexpr,
):  # fmt: skip
    """Weights of rows [row, row + BLOCK_N) for one step; their groups' zero points and, unless STAGED, scales and
    factors.
    """
    PER_EXPERT: gl.constexpr = BYTES // CHUNK
    MASKED: gl.constexpr = EXPERTS > 1 or PER_EXPERT % WARPS != 0
    local, _, chunk, real = _chunks(
        gl.SliceLayout(1, gl.SliceLayout(2, W)), ids, first, i, E, WARPS, PER_EXPERT, EXPERTS
    )
    start = chunk * CHUNK
    if PANEL < BYTES:
        start = start // PANEL * (STORED * PANEL) + start % PANEL
    at = start[:, None, None] + (row + middle(W, BLOCK_N)) * PANEL + last(W, CHUNK)
    if EXPERTS > 1:
        at = at + (local.to(gl.int64) * (STORED * BYTES))[:, None, None]
    stored = _load(codes + at, real[:, None, None], MASKED)
    scales = ()
    zeros = ()
    factors = ()
    if QUANTIZED and not STAGED:
        local, _, chunk, real = _chunks(gl.SliceLayout(1, S), ids, first, i, E, WARPS, PER_EXPERT, EXPERTS)
        rows = row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))[None, :]
        start = local * ((STORED + ROWS - 1) // ROWS * GROUPS)
        for half in gl.static_range(HALVES):
            group = (half * BYTES + chunk * CHUNK) // GROUP
            at = (start + group * (STORED if ROWS == 1 else 1))[:, None] + rows // ROWS * (1 if ROWS == 1 else GROUPS)
            scales = scales + (_load(scale + at, real[:, None], MASKED),)
        if FACTOR:
            factors = factors + (_load(factor + (local * STORED)[:, None] + rows, real[:, None], MASKED),)
    if ZERO:
        local, _, chunk, real = _chunks(gl.SliceLayout(1, Z), ids, first, i, E, WARPS, PER_EXPERT, EXPERTS)
        rows = row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, Z))[None, :]
        for half in gl.static_range(HALVES):
            group = (half * BYTES + chunk * CHUNK) // GROUP
            at = (local * (STORED * GROUPS) + group * STORED)[:, None] + rows
            zeros = zeros + (_load(zero + at, real[:, None], MASKED),)
    return stored, scales, zeros, factors


@gluon.jit
def _load_x(
    x, ids, x_row, x_real, first, i, stride_x, X: gl.constexpr, E: gl.constexpr, BYTES: gl.constexpr,
    CHUNK: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    """The channels of one step, of the columns' rows of x, or of the rows that belong to the warps' experts."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, X))
    _, choice, chunk, real = _chunks(LAYOUT, ids, first, i, E, WARPS, BYTES // CHUNK, EXPERTS)
    rows = choice[:, None, None] + x_row[None, None, :]
    at = rows * stride_x + chunk[:, None, None] * CHUNK + middle(X, CHUNK)
    mask = real[:, None, None] & x_real[None, None, :]
    xs = ()
    for half in gl.static_range(HALVES):
        xs = xs + (gl.load(x + half * BYTES + at, mask=mask, other=0.0),)
    return xs


@gluon.jit
def _stage_scales(
    scale, factor, ids, row, first, E: gl.constexpr, STORED: gl.constexpr, BYTES: gl.constexpr, CHUNK: gl.constexpr,
    WARPS: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, HALVES: gl.constexpr,
    EXPERTS: gl.constexpr, FACTOR: gl.constexpr, STAGED: gl.constexpr, SMALL: gl.constexpr,
):  # fmt: skip
    """For each half, scales times factors of all STAGED steps in shared memory, float32 [WARPS, BLOCK_N, STAGED].

    SMALL: times 2^62, for codes that are decoded to their value times 2^-126 and channels times 2^64.
    """
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 1], [2, 16, 1], [WARPS // 2, 1, 2], [1, 0, 2])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0, 2])
    CHUNKS: gl.constexpr = gl.SliceLayout(1, LOADED)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, CHUNKS))[:, None]
    step = gl.arange(0, STAGED, layout=gl.SliceLayout(0, CHUNKS))[None, :]
    local, _, chunk, real = _of_chunk(step * WARPS + warp, ids, first, E, BYTES // CHUNK, EXPERTS)
    rows = row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))[None, :, None]
    staged = ()
    for half in gl.static_range(HALVES):
        group = (half * BYTES + chunk * CHUNK) // GROUP
        at = (local * (STORED * GROUPS) + group * STORED)[:, None, :] + rows
        values = scale_of(gl.load(scale + at, mask=real[:, None, :], other=0))
        if FACTOR:
            values *= gl.load(factor + (local * STORED)[:, None, :] + rows, mask=real[:, None, :], other=0.0)
        if SMALL:
            values *= 4611686018427387904.0
        staged = staged + (gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_N, STAGED], SHARED, values),)
    return staged


@gluon.jit
def _enlarge(xs, HALVES: gl.constexpr):
    """Channels times 2^64, exactly."""
    large = ()
    for half in gl.static_range(HALVES):
        large = large + (xs[half] * 18446744073709551616.0,)
    return large


@gluon.jit
def _add_step(
    total, step, staged, i, xs, SHAPE: gl.constexpr, MMA: gl.constexpr, KIND: gl.constexpr,
    HALVES: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr, STAGED: gl.constexpr, SMALL: gl.constexpr,
):  # fmt: skip
    """total + the products of one step's weights and channels; see `_stage_scales`."""
    if KIND == "float":
        return mma_v2(step[0], xs[0], total)
    else:
        parts = decode_small(step[0]) if SMALL else decode_bytes(step[0], KIND)
        for half in gl.static_range(HALVES):
            w = parts[half]
            if ZERO:
                w = w - step[2][half].to(gl.bfloat16)[:, :, None]
            if STAGED:
                s = staged[half].slice(i, 1, 2).load(MMA)
            else:
                s = scale_of(step[1][half])
                if FACTOR:
                    s *= step[3][0]
                s = s[:, :, None]
            total += mma_v2(w, xs[half], gl.zeros(SHAPE, gl.float32, MMA)) * s
        return total


@gluon.jit(do_not_specialize=["num_tokens", "first"])
def _few_experts_kernel(
    x, codes, scale, zero, factor, bias, ids, weights, residual, out, num_tokens, first, stride_x,
    N: gl.constexpr, K: gl.constexpr, E: gl.constexpr, M: gl.constexpr, CHOSEN: gl.constexpr, CHOICES: gl.constexpr,
    EXPERTS: gl.constexpr, ONE_TOKEN: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    HALVES: gl.constexpr, PANEL: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNK: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr, WIDTH: gl.constexpr, STAGED: gl.constexpr,
    SMALL: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one expert, for all routed tokens of that expert: the first such routed token's program does
    it.

    With ACTIVATION: from tokens x [T, K] to the activation of gate and up, times the routing weights: out [routed
    token, N]; the weight has 2N rows. Else from x [routed token, K] to out [routed token, N]. With EXPERTS > 1, from x
    [routed token, K] of the only token to the sum over its routed tokens, out [1, N], plus `residual`. A warp takes
    CHUNK bytes of a row at a time.
    """
    BYTES: gl.constexpr = K // HALVES
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    GATED: gl.constexpr = ACTIVATION != ""
    STORED: gl.constexpr = 2 * N if GATED else N
    QUANTIZED: gl.constexpr = KIND != "float"
    PER_EXPERT: gl.constexpr = BYTES // CHUNK
    STEPS: gl.constexpr = (EXPERTS * PER_EXPERT + WARPS - 1) // WARPS
    BLOCKS: gl.constexpr = N // BLOCK_N
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, WIDTH)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, WIDTH)
    S: gl.constexpr = gl.SliceLayout(2, MMA)
    Z: gl.constexpr = gl.SliceLayout(2, W)
    SHAPE: gl.constexpr = [WARPS, BLOCK_N, M]
    LANES: gl.constexpr = min(BLOCK_N, 32)
    SUM: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, LANES, 32 // LANES], [1, 1, WARPS], [1, 2, 0])
    ROWS_OF_SUM: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SUM))
    TOKENS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, SUM))
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, X))
    own = gl.program_id(0) // BLOCKS
    row = gl.program_id(0) % BLOCKS * BLOCK_N
    early = ()
    if EXPERTS > 1:
        expert = own
        mine = True
        pair_of = own
        if PDL:
            launch_dependents()
        for i in gl.static_range(AHEAD):
            early = early + (
                _load_step(
                    codes, scale, zero, factor, ids, row, first, i, W, S, Z, E, STORED, BYTES, PANEL, CHUNK, WARPS,
                    BLOCK_N, GROUP, GROUPS, ROWS, HALVES, EXPERTS, QUANTIZED, ZERO, FACTOR, STAGED,
                ),
            )  # fmt: skip
        if PDL:
            wait_for_inputs()
    else:
        if PDL:  # in this order: the next kernel reads ids before it waits
            wait_for_inputs()
            launch_dependents()
        expert, mine, pair_of = routed_tokens(ids, own, first, num_tokens, E, M, CHOSEN, CHOICES, ONE_TOKEN, WARPS)
    if mine:
        x_row, x_real, pair = columns(pair_of, own, COLUMNS, TOKENS, M, GATED, EXPERTS, ONE_TOKEN)
        ahead = early
        ups = ()
        xs = ()
        if EXPERTS == 1:
            codes += expert.to(gl.int64) * (STORED * BYTES)
            scale += expert * ((STORED + ROWS - 1) // ROWS * GROUPS)
            zero += expert * (STORED * GROUPS)
            factor += expert * STORED
            for i in gl.static_range(AHEAD):
                ahead = ahead + (
                    _load_step(
                        codes, scale, zero, factor, ids, row, first, i, W, S, Z, E, STORED, BYTES, PANEL, CHUNK, WARPS,
                        BLOCK_N, GROUP, GROUPS, ROWS, HALVES, EXPERTS, QUANTIZED, ZERO, FACTOR, STAGED,
                    ),
                )  # fmt: skip
                if GATED:
                    ups = ups + (
                        _load_step(
                            codes, scale, zero, factor, ids, N + row, first, i, W, S, Z, E, STORED, BYTES, PANEL, CHUNK,
                            WARPS, BLOCK_N, GROUP, GROUPS, ROWS, HALVES, EXPERTS, QUANTIZED, ZERO, FACTOR, STAGED,
                        ),
                    )  # fmt: skip
        for i in gl.static_range(AHEAD):
            xs = xs + (_load_x(x, ids, x_row, x_real, first, i, stride_x, X, E, BYTES, CHUNK, WARPS, HALVES, EXPERTS),)
        staged = ()
        up_staged = ()
        if STAGED:
            staged = _stage_scales(
                scale, factor, ids, row, first, E, STORED, BYTES, CHUNK, WARPS, BLOCK_N, GROUP, GROUPS, HALVES, EXPERTS,
                FACTOR, STAGED, SMALL,
            )  # fmt: skip
            if GATED:
                up_staged = _stage_scales(
                    scale, factor, ids, N + row, first, E, STORED, BYTES, CHUNK, WARPS, BLOCK_N, GROUP, GROUPS, HALVES,
                    EXPERTS, FACTOR, STAGED, SMALL,
                )  # fmt: skip
        total = gl.zeros(SHAPE, gl.float32, MMA)
        up_total = gl.zeros(SHAPE, gl.float32, MMA)
        for i in gl.static_range(STEPS):
            step = ahead[0]
            ahead = ahead[1:]
            if i + AHEAD < STEPS:
                ahead = ahead + (
                    _load_step(
                        codes, scale, zero, factor, ids, row, first, i + AHEAD, W, S, Z, E, STORED, BYTES, PANEL, CHUNK,
                        WARPS, BLOCK_N, GROUP, GROUPS, ROWS, HALVES, EXPERTS, QUANTIZED, ZERO, FACTOR, STAGED,
                    ),
                )  # fmt: skip
            if GATED:
                up_step = ups[0]
                ups = ups[1:]
                if i + AHEAD < STEPS:
                    ups = ups + (
                        _load_step(
                            codes, scale, zero, factor, ids, N + row, first, i + AHEAD, W, S, Z, E, STORED, BYTES,
                            PANEL, CHUNK, WARPS, BLOCK_N, GROUP, GROUPS, ROWS, HALVES, EXPERTS, QUANTIZED, ZERO, FACTOR,
                            STAGED,
                        ),
                    )  # fmt: skip
            xi = xs[0]
            xs = xs[1:]
            if i + AHEAD < STEPS:
                xs = xs + (
                    _load_x(
                        x, ids, x_row, x_real, first, i + AHEAD, stride_x, X, E, BYTES, CHUNK, WARPS, HALVES, EXPERTS
                    ),
                )
            if SMALL:
                xi = _enlarge(xi, HALVES)
            total = _add_step(
                total, step, staged, i, xi, SHAPE, MMA, KIND, HALVES, ZERO, FACTOR, STAGED, SMALL
            )  # fmt: skip
            if GATED:
                up_total = _add_step(
                    up_total, up_step, up_staged, i, xi, SHAPE, MMA, KIND, HALVES, ZERO, FACTOR, STAGED, SMALL
                )  # fmt: skip

        SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
        total_smem = gl.allocate_shared_memory(gl.float32, SHAPE, SHARED, total)
        if GATED:
            up_smem = gl.allocate_shared_memory(gl.float32, SHAPE, SHARED, up_total)
        result = gl.sum(total_smem.load(SUM), 0)
        n = row + gl.arange(0, BLOCK_N, layout=ROWS_OF_SUM)
        stored = pair >= 0
        mask = stored[None, :] & (n < N)[:, None]
        if EXPERTS > 1:
            for choice in gl.static_range(EXPERTS):
                if BIAS:
                    local = gl.load(ids + choice) - first
                    if (local >= 0) & (local < E):
                        b = gl.load(bias + local * N + n).to(gl.float32)
                        result += (b * gl.load(weights + choice))[:, None]
            if RESIDUAL:
                result += gl.load(residual + n).to(gl.float32)[:, None]
            at = n[:, None] + pair[None, :] * 0
        else:
            weight = gl.load(weights + pair, mask=stored, other=0.0)[None, :]
            at = pair[None, :] * N + n[:, None]
            if BIAS:
                b = gl.load(bias + expert * STORED + n).to(gl.float32)[:, None]
            if GATED:
                up = gl.sum(up_smem.load(SUM), 0)
                if BIAS:
                    result += b
                    up += gl.load(bias + expert * STORED + N + n).to(gl.float32)[:, None]
                result = activate_gated(result, up, ACTIVATION) * weight
            elif BIAS:
                result += b * weight
        gl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


class Config(NamedTuple):
    """Tile sizes; see `_few_experts_kernel`. BLOCK_N divides the outputs, CHUNK the bytes of a row."""

    block_n: int
    warps: int
    chunk: int
    ahead: int
    width: int = 8  # bytes of a row that a thread takes at a time
    staged: bool = False  # scales by way of shared memory, where each row has several


class _Call(NamedTuple):
    """A GEMM with a weight of `rows` rows, each of `row` bytes of codes or `row` floats."""

    kind: str
    rows: int
    row: int
    halves: int  # codes of a byte
    group: int
    streams: int  # 2: gate and up
    experts: int
    num_tokens: int
    in_panels: bool = False


@functools.cache
def _choose(call: _Call) -> Config | None:
    """Choose for a GEMM. Loads in flight fill some 100 registers of each thread; a step lies within one group.

    For several tokens, gate and up in bfloat16 are faster with more warps, each with fewer loads in flight, and down
    with fewer programs of more rows, unless warps read chunks of 128 codes.
    """
    kind, rows, row, halves, group, streams, experts, num_tokens, in_panels = call
    blocks = kind == "e4m3" and group < row
    if blocks and num_tokens == 1 and row % 128 == 0:  # there is little to read: many threads at once
        if experts > 1:
            return Config(16, 16, 128, 1, 16)
        return Config(32, 8, 128, 1, 16) if in_panels and rows % 64 == 0 else Config(16, 8, 64, 1)
    size = 2 if kind == "float" else 1
    whole = group if group < row * halves else row
    several = num_tokens > 1 and experts == 1 and kind in ("float", "e4m3")
    even = row % 512 == 0  # four warps have equally many chunks of 128
    tall = several and streams == 1 and rows % 32 == 0 and (kind == "float" or not even)
    narrow = several and streams == 2 and kind == "float"
    sizes = [128] if experts == halves == 1 and even and not tall and not narrow else []
    chunk = next((size for size in (*sizes, 64, 32) if row % size == whole % size == 0), None)
    if chunk is None:
        return None
    chunks = row // chunk * experts
    staged, small = kind in ("e2m1", "int4"), kind == "e2m1"
    warps = 8 if small or narrow or (experts > 1 and chunks % 8 == 0) else 4
    block_n = 32 if tall else 16
    columns = max(next_power_of_2(num_tokens), 8)
    registers = chunk * size * streams * block_n // 128 + chunk * halves * columns // 64  # of a thread for one step
    ahead = max(min((60 if narrow else 100) // registers, chunks // warps, 3 if small else 6), 1)
    return Config(block_n, warps, chunk, ahead, 16 if blocks and chunk >= 64 and num_tokens > 1 else 8, staged)


def config(x: Tensor, weight: Weight, num_tokens: int, gated: bool, experts: int = 1) -> Config | None:
    """Return how to compute x times the experts' weight for at most 8 tokens; None where `launch` cannot.

    experts: matrices whose channels follow one another in one GEMM.
    """
    codes = weight.codes if isinstance(weight, QuantizedWeight) else weight
    _, n, row = codes.shape
    streams = 2 if gated else 1
    if (
        x.dtype != torch.bfloat16
        or x.stride(0) % 8 != 0
        or x.data_ptr() % 16 != 0
        or n % (16 * streams) != 0
        or not has_tensor_cores(x.device)
    ):
        return None
    if isinstance(weight, QuantizedWeight):
        if weight.order is not None or (n // streams) % weight.rows != 0:
            return None
        shape = n, row, x.shape[1] // row, weight.group, streams, experts, num_tokens
        return _choose(_Call(weight.kind, *shape, in_panels=weight.panel > 0))
    return _choose(_Call("float", n, row, 1, row, streams, experts, num_tokens))


def launch(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    config: Config,
    *,
    activation: str = "",
    experts: int = 1,
    residual: Tensor | None = None,
    first: int = 0,
) -> None:
    """See `_few_experts_kernel`."""
    num_tokens, chosen = ids.shape
    n, k = out.shape[1], x.shape[1]
    assert x.stride(1) == out.stride(1) == 1
    codes = scale = zero = factor = weight if isinstance(weight, Tensor) else weight.codes
    kind, group, rows, halves, panel = "float", k, 1, 1, k
    if isinstance(weight, QuantizedWeight):
        codes, scale = _bytes(weight.codes), _bytes(weight.scale)
        zero, factor = weight.zero, weight.factor
        kind, group, rows, halves = weight.kind, weight.group, weight.rows, k // codes.shape[2]
        panel = weight.panel or k // halves
        assert weight.lies_by_groups()
    assert codes.is_contiguous()
    steps = cdiv(experts * (k // halves // config.chunk), config.warps)
    staged = next_power_of_2(steps) if config.staged and kind != "float" and rows == 1 and group < k else 0
    programs = (n // config.block_n) * (ids.numel() if experts == 1 else 1)
    _few_experts_kernel[(programs,)](
        x, codes, scale, scale if zero is None else zero, scale if factor is None else factor,
        x if bias is None else bias, ids, weights, out if residual is None else residual, out, num_tokens, first,
        x.stride(0), N=n, K=k, E=len(codes), M=max(next_power_of_2(num_tokens), 8), CHOSEN=chosen,
        CHOICES=next_power_of_2(chosen), EXPERTS=experts, ONE_TOKEN=num_tokens == 1, KIND=kind, GROUP=group, ROWS=rows,
        HALVES=halves, PANEL=panel, ZERO=kind != "float" and zero is not None,
        FACTOR=kind != "float" and factor is not None, BLOCK_N=config.block_n, CHUNK=config.chunk, AHEAD=config.ahead,
        WARPS=config.warps, WIDTH=config.width, STAGED=staged, SMALL=staged > 0 and kind == "e2m1" and zero is None,
        ACTIVATION=activation, BIAS=bias is not None, RESIDUAL=residual is not None, num_warps=config.warps,
        **pdl_options(x.device),
    )  # fmt: skip


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in (torch.float8_e4m3fn, torch.int8) else tensor
