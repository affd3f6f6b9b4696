"""The experts of up to 8 tokens, of bfloat16 in 12 bits a weight, in Gluon; see `kernels.data.compressed_weight`.

As in `kernels.gluon.moe.small_batch`, a thread loads words straight into registers, where they become operands of the
tensor core. A program multiplies sixteen rows of one expert by all tokens that chose it; its warps share the channels.
Of a single token, the GEMMs with its experts' down matrices are one GEMM over the channels of all of them.
"""

# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.data.compressed_weight import CompressedWeight
from kernels.gluon.common.activation import activate_gated
from kernels.gluon.common.compressed_bits import DOWN, UP, decode_fragments, listed_channel, listed_row, listed_value
from kernels.gluon.common.layouts import last, middle
from kernels.gluon.moe.small_batch import _chunks, _load_x, columns, routed_tokens
from kernels.gpu.launch import launch_dependents, next_power_of_2, pdl_options, wait_for_inputs


@gluon.jit
def _load_words(
    codes, scale, ids, strip, first, i,
    E: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr, EXPERTS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Each warp's words of step i [WARPS, 32, 4] in three pieces, of the strip's 16 rows and 64 channels; its rows'
    scales.
    """
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    PER_EXPERT: gl.constexpr = K // 64
    MASKED: gl.constexpr = EXPERTS > 1 or PER_EXPERT % WARPS != 0
    local, _, chunk, real = _chunks(
        gl.SliceLayout(1, gl.SliceLayout(2, WORDS)), ids, first, i, E, WARPS, PER_EXPERT, EXPERTS
    )
    at = (strip // 8 * PER_EXPERT + chunk) * 3072 + (strip // 4 % 2 * 1536 + strip % 4 * 128)
    at = at[:, None, None] + middle(WORDS, 32) * 4 + last(WORDS, 4)
    if EXPERTS > 1:
        at = at + (local.to(gl.int64) * (ROWS * K // 8 * 3))[:, None, None]
    words = ()
    for piece in gl.static_range(3):
        if MASKED:
            some = gl.load(codes + at + piece * 512, mask=real[:, None, None], other=0, eviction_policy="evict_first")
        else:
            some = gl.load(codes + at + piece * 512, eviction_policy="evict_first")
        words = words + (some,)
    PER_WARP: gl.constexpr = gl.SliceLayout(2, MMA)
    local, _, _, real = _chunks(gl.SliceLayout(1, PER_WARP), ids, first, i, E, WARPS, PER_EXPERT, EXPERTS)
    row = strip * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, PER_WARP))
    scales = gl.load(scale + (local * ROWS)[:, None] + row[None, :], mask=real[:, None], other=0.0)
    return words[0], words[1], words[2], scales


@gluon.jit
def _add_step(total, step, x, WARPS: gl.constexpr, MMA: gl.constexpr):
    """total + the products of one step's weights and channels."""
    first, second, exponents, scales = step
    values = decode_fragments(first, second, exponents, WARPS).reshape([WARPS, 16, 64])
    w = gl.convert_layout(values, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
    return total + mma_v2(w, x * UP, gl.zeros(total.shape, gl.float32, MMA)) * scales[:, :, None]


@gluon.jit
def _listed(
    LAYOUT: gl.constexpr, small, ids, strip, first, j,
    E: gl.constexpr, ROWS: gl.constexpr, ROOM: gl.constexpr, WARPS: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    """Each warp's small weights of step j, sixteen of one expert: [WARPS, 16], and its number among those chosen,
    [WARPS].
    """
    PER_EXPERT: gl.constexpr = ROOM // 16
    local, choice, chunk, real = _chunks(gl.SliceLayout(1, LAYOUT), ids, first, j, E, WARPS, PER_EXPERT, EXPERTS)
    at = (local * (ROWS // 64) + strip // 4) * ROOM + chunk * 16
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(small + at[:, None] + i[None, :], mask=real[:, None], other=0), local, choice, real


@gluon.jit
def _add_small(
    total, x, small, scale, ids, strip, first, x_row, x_real, stride_x,
    E: gl.constexpr, ROWS: gl.constexpr, ROOM: gl.constexpr, WARPS: gl.constexpr, EXPERTS: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """total + the products of the block's small weights: columns of a weight whose other rows are zeros."""
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    S: gl.constexpr = gl.SliceLayout(2, MMA)
    for j in gl.static_range((EXPERTS * ROOM // 16 + WARPS - 1) // WARPS):
        listed, _, _, _ = _listed(gl.SliceLayout(1, W), small, ids, strip, first, j, E, ROWS, ROOM, WARPS, EXPERTS)
        own = listed_row(listed)[:, None, :] == strip % 4 * 16 + middle(W, 16)
        w = gl.where(own, listed_value(listed)[:, None, :], 0.0)
        listed, _, choice, real = _listed(
            gl.SliceLayout(2, X), small, ids, strip, first, j, E, ROWS, ROOM, WARPS, EXPERTS
        )
        rows = choice[:, None, None] + x_row[None, None, :]
        mask = (real[:, None] & (listed != 0))[:, :, None] & x_real[None, None, :]
        xs = gl.load(x + rows * stride_x + listed_channel(listed)[:, :, None], mask=mask, other=0.0) * DOWN
        local, _, _, real = _chunks(gl.SliceLayout(1, S), ids, first, j, E, WARPS, ROOM // 16, EXPERTS)
        row = strip * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, S))
        scales = gl.load(scale + (local * ROWS)[:, None] + row[None, :], mask=real[:, None], other=0.0)
        total += mma_v2(w, xs, gl.zeros(total.shape, gl.float32, MMA)) * scales[:, :, None]
    return total


@gluon.jit(do_not_specialize=["num_tokens", "first"])
def _compressed_few_kernel(
    x, codes, scale, small, ids, weights, residual, out, num_tokens, first, stride_x,
    N: gl.constexpr, K: gl.constexpr, ROOM: gl.constexpr, E: gl.constexpr, M: gl.constexpr, CHOSEN: gl.constexpr,
    CHOICES: gl.constexpr, EXPERTS: gl.constexpr, ONE_TOKEN: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
    ACTIVATION: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Sixteen rows of one expert, for all routed tokens of that expert: the first such routed token's program does it.

    With ACTIVATION: from tokens x [T, K] to the activation of gate and up, times the routing weights: out [routed
    token, N]; the weight has 2N rows. Else from x [routed token, K] to out [routed token, N]. With EXPERTS > 1, from x
    [routed token, K] of the only token to the sum over its routed tokens, out [1, N], plus `residual`. A warp takes 64
    channels at a time.
    """
    GATED: gl.constexpr = ACTIVATION != ""
    ROWS: gl.constexpr = 2 * N if GATED else N
    PER_EXPERT: gl.constexpr = K // 64
    STEPS: gl.constexpr = (EXPERTS * PER_EXPERT + WARPS - 1) // WARPS
    STRIPS: gl.constexpr = ROWS // 16
    OWN: gl.constexpr = 8 if GATED else 16  # rows of out
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SUM: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, OWN, 32 // OWN], [1, 1, WARPS], [1, 2, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, SUM)
    TOKENS: gl.constexpr = gl.SliceLayout(0, OUT)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, X))
    own = gl.program_id(0) // STRIPS
    strip = gl.program_id(0) % STRIPS
    early = ()
    if EXPERTS > 1:
        mine = True
        pair_of = own
        if PDL:
            launch_dependents()
        for i in gl.static_range(AHEAD):
            early = early + (_load_words(codes, scale, ids, strip, first, i, E, ROWS, K, WARPS, EXPERTS, MMA),)
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
        xs = ()
        if EXPERTS == 1:
            codes += expert.to(gl.int64) * (ROWS * K // 8 * 3)
            scale += expert * ROWS
            small += expert * (ROWS // 64) * ROOM
            for i in gl.static_range(AHEAD):
                ahead = ahead + (_load_words(codes, scale, ids, strip, first, i, E, ROWS, K, WARPS, EXPERTS, MMA),)
        for i in gl.static_range(AHEAD):
            xs = xs + (_load_x(x, ids, x_row, x_real, first, i, stride_x, X, E, K, 64, WARPS, 1, EXPERTS)[0],)
        total = gl.zeros([WARPS, 16, M], gl.float32, MMA)
        total = _add_small(
            total, x, small, scale, ids, strip, first, x_row, x_real, stride_x, E, ROWS, ROOM, WARPS, EXPERTS, MMA
        )
        for i in gl.static_range(STEPS):
            step = ahead[0]
            xi = xs[0]
            ahead = ahead[1:]
            xs = xs[1:]
            if i + AHEAD < STEPS:
                ahead = ahead + (
                    _load_words(codes, scale, ids, strip, first, i + AHEAD, E, ROWS, K, WARPS, EXPERTS, MMA),
                )
                xs = xs + (
                    _load_x(x, ids, x_row, x_real, first, i + AHEAD, stride_x, X, E, K, 64, WARPS, 1, EXPERTS)[0],
                )
            total = _add_step(total, step, xi, WARPS, MMA)
        total *= DOWN
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
        totals = gl.allocate_shared_memory(gl.float32, [WARPS, 16, M], SHARED, total)
        result = gl.sum(totals.slice(0, OWN, 1).load(SUM), 0)
        n = strip * OWN + gl.arange(0, OWN, layout=gl.SliceLayout(1, OUT))
        stored = pair >= 0
        if GATED:
            result = activate_gated(result, gl.sum(totals.slice(OWN, OWN, 1).load(SUM), 0), ACTIVATION)
        if EXPERTS > 1:
            if RESIDUAL:
                result += gl.load(residual + n).to(gl.float32)[:, None]
            at = n[:, None] + pair[None, :] * 0
        else:
            if GATED:
                result *= gl.load(weights + pair, mask=stored, other=0.0)[None, :]
            at = pair[None, :] * N + n[:, None]
        gl.store(out + at, result.to(out.dtype.element_ty), mask=stored[None, :] & (n < N)[:, None])


class Config(NamedTuple):
    """Warps of a program, and the number of steps whose words are loaded ahead."""

    warps: int
    ahead: int


def config(k: int, experts: int) -> Config:
    """For rows of k channels of each of `experts` experts. Measured on an H200."""
    steps = k // 64 * experts
    warps = 16 if experts > 1 else 4
    return Config(warps, max(min(2 if experts > 1 else 8, steps // warps), 1))


def launch(
    x: Tensor,
    weight: CompressedWeight,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    *,
    activation: str = "",
    experts: int = 1,
    residual: Tensor | None = None,
    first: int = 0,
) -> None:
    """See `_compressed_few_kernel`."""
    num_tokens, chosen = ids.shape
    count, rows, k = weight.shape
    n = out.shape[1]
    assert x.stride(1) == out.stride(1) == 1
    assert weight.gated == bool(activation)
    warps, ahead = config(k, experts)
    _compressed_few_kernel[(rows // 16 * (ids.numel() if experts == 1 else 1),)](
        x, weight.codes, weight.scale, weight.small, ids, weights, out if residual is None else residual, out,
        num_tokens, first, x.stride(0), N=n, K=k, ROOM=weight.small.shape[2], E=count,
        M=max(next_power_of_2(num_tokens), 8), CHOSEN=chosen, CHOICES=next_power_of_2(chosen), EXPERTS=experts,
        ONE_TOKEN=num_tokens == 1, AHEAD=ahead, WARPS=warps, ACTIVATION=activation, RESIDUAL=residual is not None,
        num_warps=warps, **pdl_options(x.device),
    )  # fmt: skip
