"""GEMMs of up to 16 tokens on tensor cores, in Gluon, with the norm before and the gated activation or sum
after them.

A weight is read once, so it never goes through shared memory: each thread loads 16 bytes of a row straight into the
registers from which the tensor core takes it, and the channels of the tokens in the same order. The warps of a program
have the same rows and different channels; their sums meet in shared memory once, at the end. The first `AHEAD` chunks
of weights are on their way before the program waits for the kernel ahead of it (programmatic dependent launch), and as
many always are.
"""

# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.data.fusion import Fusion
from kernels.gluon.common.activation import activate
from kernels.gluon.common.layouts import last, middle, warps
from kernels.gluon.linear.adapters import NO_ADAPTERS, Adapters, arguments, expand, load_inner, load_up, shrink
from kernels.gpu.device import has_tensor_cores
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs


@gluon.jit
def _load_step(
    pointers, chunks, i: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr, WARPS: gl.constexpr, POLICY: gl.constexpr
):
    """The channels of step i of each warp, whose chunk of the first step is given; those from K on are 0, and are not
    read.
    """
    if (i + 1) * CHUNK * WARPS <= K:
        return gl.load(pointers + i * CHUNK * WARPS, eviction_policy=POLICY)
    else:
        return gl.load(
            pointers + i * CHUNK * WARPS, mask=chunks + i * WARPS < K // CHUNK, other=0.0, eviction_policy=POLICY
        )


@gluon.jit(do_not_specialize=["num_tokens", "num_shrink"])
def _few_linear_kernel(
    x, weight, bias, norm_weight, residual, out, eps, num_tokens, stride_x, stride_out,
    slots, adapter_down, adapter_up, factor, shift, inner, arrivals, stride_down, stride_up, stride_factor, num_shrink,
    N: gl.constexpr, K: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, AHEAD: gl.constexpr,
    X_AHEAD: gl.constexpr, CHAINS: gl.constexpr, WARPS: gl.constexpr, TOKENS_FIRST: gl.constexpr,
    NORM: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
    ADAPTED: gl.constexpr, USERS: gl.constexpr, RANK: gl.constexpr, RANKS: gl.constexpr, PARTS: gl.constexpr,
    CHANNELS: gl.constexpr, END_0: gl.constexpr, END_1: gl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and weight [N, K], or [2N, K] with GATE ("silu", "gelu_tanh"): gate rows, then up rows.

    A warp takes CHUNK channels at a time, and adds to CHAINS sums in turns. TOKENS_FIRST: tokens are the 16 rows of the
    tensor core's tile and weights its 8 columns, else weights are the rows and tokens the columns. Rows of the tile
    beyond the tokens (or the weight) repeat the last one, and are not stored.

    ADAPTED: the first num_shrink programs compute A · x of the tokens' adapters, the others add B times that.
    """
    GATED: gl.constexpr = GATE != ""
    STEPS: gl.constexpr = (K // CHUNK + WARPS - 1) // WARPS
    LATE: gl.constexpr = STEPS - AHEAD + (AHEAD > 1)  # step from which some registers of weights are free
    ONCE: gl.constexpr = "evict_first"
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    LANES: gl.constexpr = min(BLOCK_N, 32)
    if PDL:
        launch_dependents()
    program = gl.program_id(0)
    if ADAPTED:
        if program < num_shrink:
            shrink(
                program, x, norm_weight, slots, adapter_down, inner, arrivals, stride_x, stride_down,
                K, RANKS, PARTS, CHANNELS, WARPS, NORM, PDL,
            )  # fmt: skip
            return
        program -= num_shrink
    first = program * BLOCK_N
    weights = weight + first.to(gl.int64) * K

    # The layouts of a weight's row, a token's row and the sums. In SUM a thread has one element of all warps' sums.
    if TOKENS_FIRST:
        W: gl.constexpr = B
        X: gl.constexpr = A
        X_CHANNELS: gl.constexpr = 2
        SHAPE: gl.constexpr = [WARPS, M, BLOCK_N]
        SUM: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 1, 0])
        ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, SUM))
        TOKENS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SUM))
        w_rows = last(W, BLOCK_N)
        w_chunks = warps(W, WARPS)
        w_channels = w_chunks * CHUNK + middle(W, CHUNK)
        x_rows = middle(X, M)
        x_chunks = warps(X, WARPS)
        x_channels = x_chunks * CHUNK + last(X, CHUNK)
        n = (first + gl.arange(0, BLOCK_N, layout=ROWS))[None, :]
        m = gl.arange(0, M, layout=TOKENS)[:, None]
    else:
        W: gl.constexpr = A
        X: gl.constexpr = B
        X_CHANNELS: gl.constexpr = 1
        SHAPE: gl.constexpr = [WARPS, BLOCK_N, M]
        SUM: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, LANES, 32 // LANES], [1, 1, WARPS], [1, 2, 0])
        ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SUM))
        TOKENS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, SUM))
        w_rows = middle(W, BLOCK_N)
        w_chunks = warps(W, WARPS)
        w_channels = w_chunks * CHUNK + last(W, CHUNK)
        x_rows = last(X, M)
        x_chunks = warps(X, WARPS)
        x_channels = x_chunks * CHUNK + middle(X, CHUNK)
        n = (first + gl.arange(0, BLOCK_N, layout=ROWS))[:, None]
        m = gl.arange(0, M, layout=TOKENS)[None, :]
    if N % BLOCK_N != 0:
        w_rows = gl.minimum(w_rows, N - 1 - first)
    w_pointers = weights + w_rows * K + w_channels
    up_pointers = w_pointers + N * K
    x_pointers = x + gl.minimum(x_rows, num_tokens - 1) * stride_x + x_channels
    g_pointers = norm_weight + x_channels
    at = m * stride_out + n
    mask = (m < num_tokens) & (n < N)

    ws = ()
    ups = ()
    gs = ()
    xs = ()
    for i in gl.static_range(AHEAD):
        ws = ws + (_load_step(w_pointers, w_chunks, i, K, CHUNK, WARPS, ONCE),)
        if GATED:
            ups = ups + (_load_step(up_pointers, w_chunks, i, K, CHUNK, WARPS, ONCE),)
    if NORM:
        for i in gl.static_range(X_AHEAD):
            gs = gs + (_load_step(g_pointers, x_chunks, i, K, CHUNK, WARPS, ""),)
    if BIAS:
        b = gl.load(bias + n, mask=n < N, other=0.0)
        if GATED:
            b_up = gl.load(bias + N + n, mask=n < N, other=0.0)
    if PDL:
        wait_for_inputs()
    for i in gl.static_range(X_AHEAD):
        xs = xs + (_load_step(x_pointers, x_chunks, i, K, CHUNK, WARPS, ""),)
    if RESIDUAL:
        before = gl.load(residual + at, mask=mask, other=0.0)
    sums = ()
    up_sums = ()
    for _ in gl.static_range(CHAINS):
        sums = sums + (gl.zeros(SHAPE, gl.float32, MMA),)
        up_sums = up_sums + (gl.zeros(SHAPE, gl.float32, MMA),)
    if NORM:
        squares = gl.zeros(xs[0].shape, gl.float32, X)
    for i in gl.static_range(STEPS):
        if ADAPTED:  # noqa: SIM102 (what follows is compiled only where it is asked for)
            if i == LATE:
                bs = load_up(slots, adapter_up, first, num_tokens, stride_up, N, USERS, BLOCK_N, RANK, GATED, WARPS)
                slot = gl.load(slots + m, mask=m < num_tokens, other=-1).to(gl.int64)
                adapted = (slot >= 0) & (n < N)
                factors = gl.load(factor + slot * stride_factor + n, mask=adapted, other=1.0)
                shifts = gl.load(shift + slot * stride_factor + n, mask=adapted, other=0.0)
                if GATED:
                    up_factors = gl.load(factor + slot * stride_factor + N + n, mask=adapted, other=1.0)
                    up_shifts = gl.load(shift + slot * stride_factor + N + n, mask=adapted, other=0.0)
                us = load_inner(
                    slots, inner, arrivals, num_shrink, first, num_tokens,
                    N, USERS, RANK, RANKS, PARTS, END_0, END_1, GATED, WARPS,
                )  # fmt: skip
        w = ws[0]
        xi = xs[0]
        ws = ws[1:]
        xs = xs[1:]
        if i + AHEAD < STEPS:
            ws = ws + (_load_step(w_pointers, w_chunks, i + AHEAD, K, CHUNK, WARPS, ONCE),)
        if GATED:
            w_up = ups[0]
            ups = ups[1:]
            if i + AHEAD < STEPS:
                ups = ups + (_load_step(up_pointers, w_chunks, i + AHEAD, K, CHUNK, WARPS, ONCE),)
        if i + X_AHEAD < STEPS:
            xs = xs + (_load_step(x_pointers, x_chunks, i + X_AHEAD, K, CHUNK, WARPS, ""),)
        if NORM:
            g = gs[0]
            gs = gs[1:]
            if i + X_AHEAD < STEPS:
                gs = gs + (_load_step(g_pointers, x_chunks, i + X_AHEAD, K, CHUNK, WARPS, ""),)
            wide = xi.to(gl.float32)
            squares += wide * wide
            xi = (wide * g.to(gl.float32)).to(xi.dtype)
        if TOKENS_FIRST:
            sums = sums[1:] + (mma_v2(xi, w, sums[0]),)
            if GATED:
                up_sums = up_sums[1:] + (mma_v2(xi, w_up, up_sums[0]),)
        else:
            sums = sums[1:] + (mma_v2(w, xi, sums[0]),)
            if GATED:
                up_sums = up_sums[1:] + (mma_v2(w_up, xi, up_sums[0]),)

    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    total = sums[0]
    up_total = up_sums[0]
    for i in gl.static_range(1, CHAINS):
        total += sums[i]
        up_total += up_sums[i]
    total_smem = gl.allocate_shared_memory(gl.float32, SHAPE, SHARED, total)
    if GATED:
        up_smem = gl.allocate_shared_memory(gl.float32, SHAPE, SHARED, up_total)
    if NORM:
        squares_smem = gl.allocate_shared_memory(gl.float32, [WARPS, M], FLAT, gl.sum(squares, X_CHANNELS))
    result = gl.sum(total_smem.load(SUM), 0)
    if GATED:
        up = gl.sum(up_smem.load(SUM), 0)
    if ADAPTED:
        change, up_change = expand(bs, us, RANK, GATED, TOKENS_FIRST, SUM)
    if NORM:
        TOKENS_OF_SUM: gl.constexpr = gl.SliceLayout(X_CHANNELS, SUM)
        mean = gl.sum(squares_smem.load(TOKENS_OF_SUM), 0) / K
        scale = gl.convert_layout(gl.rsqrt(mean + eps), TOKENS)
        scale = scale[:, None] if TOKENS_FIRST else scale[None, :]
        result *= scale
        if GATED:
            up *= scale
        if ADAPTED:
            change = change * scale
            if GATED:
                up_change = up_change * scale
    if BIAS:
        result += b.to(gl.float32)
        if GATED:
            up += b_up.to(gl.float32)
    if ADAPTED:
        result = result * factors + shifts + change
        if GATED:
            up = up * up_factors + up_shifts + up_change
    if GATED:
        result = activate(result, GATE) * up
    if RESIDUAL:
        result += before.to(gl.float32)
    gl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


class Config(NamedTuple):
    """Tile sizes; see `_few_linear_kernel`. CHUNK must divide the channels."""

    block_n: int
    warps: int
    chunk: int = 64
    ahead: int = 1
    x_ahead: int = 1
    chains: int = 1
    tokens_first: bool = False
    registers: int | None = None  # at most, of a thread


# Measured on an H200, in graphs of whole layers. (N, K, gated): up to 8 tokens, and up to 16; None: cuBLAS is faster.
MEASURED: dict[tuple[int, int, bool], tuple[Config, Config | None]] = {
    (4096, 1024, False): (
        Config(block_n=16, warps=4, ahead=4, x_ahead=4, chains=2),
        Config(block_n=16, warps=8, ahead=2, x_ahead=2, chains=2, tokens_first=True),
    ),
    (1024, 2048, False): (
        Config(block_n=16, warps=16, ahead=2, x_ahead=2, chains=2, tokens_first=True),
        Config(block_n=16, warps=16, ahead=2, x_ahead=2, chains=2, tokens_first=True),
    ),
    (3072, 1024, True): (
        Config(block_n=16, warps=4, ahead=4, x_ahead=4),
        Config(block_n=16, warps=4, ahead=4, x_ahead=4),
    ),
    (1024, 3072, False): (
        Config(block_n=16, warps=8, ahead=6, x_ahead=6, chains=2),
        Config(block_n=16, warps=16, ahead=3, x_ahead=3, chains=3, tokens_first=True),
    ),
    (6144, 4096, False): (Config(block_n=16, warps=4, ahead=2, x_ahead=2, chains=2), None),
    (4096, 4096, False): (Config(block_n=16, warps=8, ahead=4, x_ahead=2, chains=2), None),
    (14336, 4096, True): (Config(block_n=16, warps=8, ahead=4, x_ahead=2), None),
    (4096, 14336, False): (Config(block_n=16, warps=8, ahead=4, x_ahead=2, chains=2), None),
    (8192, 3840, False): (Config(block_n=16, warps=8, ahead=4, x_ahead=2, registers=128), None),
    (15360, 3840, True): (Config(block_n=16, warps=8, ahead=4, x_ahead=2), None),
    (5120, 2048, False): (
        Config(block_n=16, warps=4, ahead=4, x_ahead=2, chains=2),
        Config(block_n=16, warps=8, ahead=4, x_ahead=2, chains=2),
    ),
    (2048, 4096, False): (
        Config(block_n=16, warps=8, ahead=8, x_ahead=2, chains=2),
        Config(block_n=16, warps=8, ahead=4, x_ahead=2, chains=2),
    ),
    (5120, 2880, False): (Config(block_n=16, warps=4, ahead=6, x_ahead=2, registers=168),) * 2,
    (2880, 4096, False): (
        Config(block_n=16, warps=8, ahead=4, x_ahead=2, chains=2),
        Config(block_n=8, warps=4, ahead=8, x_ahead=2, tokens_first=True),
    ),
}


def config(n: int, k: int, gated: bool) -> Config:
    """Return how to compute a shape that was not measured: loads into some 64 registers of each thread in flight."""
    chunks = k // 64
    warps = min(chunks & -chunks, 8)
    warps = warps if warps > 2 else 4  # some have a chunk less
    narrow = n < 2048  # as many programs as multiprocessors only with 8 rows each
    block_n = 8 if narrow else 16
    ahead = max(64 // (2 * block_n if gated else block_n), 1)
    return Config(block_n, warps, ahead=ahead, x_ahead=2, chains=1 if gated else 2, tokens_first=narrow)


def supports(x: Tensor) -> bool:
    """Return whether `launch` computes x [M, K], M <= 16: bfloat16, because float16 might overflow before the norm's
    factor comes, K a multiple of 64, rows that begin at multiples of 16 bytes, tensor cores.
    """
    return (
        x.dtype == torch.bfloat16
        and x.shape[1] % 64 == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and has_tensor_cores(x.device)
    )


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: Config,
    fusion: Fusion,
    adapters: Adapters | None = None,
) -> None:
    """Compute x [M, K] -> out [M, N], 1 <= M <= 16, plus `residual`, of the strides of `out`; see `supports`."""
    norm_weight, eps, gate, residual, _ = fusion
    num_tokens, k = x.shape
    n = out.shape[1]
    assert k % config.chunk == 0
    steps = cdiv(k // config.chunk, config.warps)
    m = max(next_power_of_2(num_tokens), 16 if config.tokens_first else 8)
    num_shrink, added, constants = NO_ADAPTERS
    if adapters is not None:
        num_shrink, added, constants = arguments(x, adapters, m)
        config = config._replace(registers=config.registers or {4: 168, 8: 128}.get(config.warps))
    _few_linear_kernel[(num_shrink + cdiv(n, config.block_n),)](
        x, weight, weight if bias is None else bias, weight if norm_weight is None else norm_weight,
        out if residual is None else residual, out, eps, num_tokens, x.stride(0), out.stride(0), *added, N=n, K=k,
        M=m, BLOCK_N=config.block_n, CHUNK=config.chunk, AHEAD=min(config.ahead, steps),
        X_AHEAD=min(config.x_ahead, steps), CHAINS=min(config.chains, steps), WARPS=config.warps,
        TOKENS_FIRST=config.tokens_first, NORM=norm_weight is not None, GATE=gate or "", BIAS=bias is not None,
        RESIDUAL=residual is not None, **constants, num_warps=config.warps, maxnreg=config.registers,
        **pdl_options(x.device),
    )  # fmt: skip
