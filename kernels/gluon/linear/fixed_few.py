"""GEMM of up to 16 tokens and a float weight with one order of sums, in Gluon: deterministic mode's where steps are
bound by reading weights.

The order is that of `kernels.triton.fixed_parts`: 16 channels in an instruction of the tensor core after the other, in
pieces whose float32 sums a fixed tree adds up. A warp multiplies a piece of eight rows. A thread has the same four
channels of a row and of a token, 8 bytes that it loads straight into the registers from which the tensor core takes
them: which place of an instruction a channel has changes no bit, only which 16 are together. All pieces of a row are in
one program, so their sums meet in shared memory. Weights are on their way before the program waits for the kernel ahead
of it (programmatic dependent launch). The norm before, of one token, rounds as a kernel of its own does; so do the
activation and the residual sum.
"""

# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.data.activation import Gate
from kernels.gluon.common.activation import activate
from kernels.gluon.common.layouts import last, middle, warps
from kernels.gpu.device import is_hopper, num_multiprocessors
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs

TOKENS = 16
AHEAD = 64  # instructions of a piece whose weights are on their way at once; of a longer one half as many


@gluon.jit
def _multiply(sums, x, more, w, BF16: gl.constexpr):
    """Add 16 channels of tokens, and of `more` tokens, times rows to sums (low, high, more low, more high): those of a
    thread's token and of two neighbouring rows.
    """
    KIND: gl.constexpr = "bf16.bf16" if BF16 else "f16.f16"
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a<4>, b<2>; mov.b64 {a0, a2}, $4; mov.b64 {a1, a3}, $5; mov.b64 {b0, b1}, $6; "
        "mma.sync.aligned.m16n8k16.row.col.f32." + KIND + ".f32 "
        "{$0, $1, $2, $3}, {a0, a1, a2, a3}, {b0, b1}, {$7, $8, $9, $10}; }",
        "=f,=f,=f,=f,l,l,l,f,f,f,f", [x, more, w, sums[0], sums[1], sums[2], sums[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _normed(x, weight, factor):
    """Four channels, bfloat16 in words of 64 bits, times a factor, rounded, times four weights, rounded."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, d; .reg .f32 e, f, g, h; "
        "mov.b64 {a, b}, $1; shl.b32 c, a, 16; and.b32 a, a, 0xffff0000; shl.b32 d, b, 16; and.b32 b, b, 0xffff0000; "
        "mov.b32 e, c; mov.b32 f, a; mov.b32 g, d; mov.b32 h, b; "
        "mul.rn.f32 e, e, $3; mul.rn.f32 f, f, $3; mul.rn.f32 g, g, $3; mul.rn.f32 h, h, $3; "
        "cvt.rn.bf16x2.f32 a, f, e; cvt.rn.bf16x2.f32 b, h, g; "
        "shl.b32 c, a, 16; and.b32 a, a, 0xffff0000; shl.b32 d, b, 16; and.b32 b, b, 0xffff0000; "
        "mov.b32 e, c; mov.b32 f, a; mov.b32 g, d; mov.b32 h, b; "
        "{ .reg .f32 i, j, k, l; "
        "mov.b64 {a, b}, $2; shl.b32 c, a, 16; and.b32 a, a, 0xffff0000; shl.b32 d, b, 16; and.b32 b, b, 0xffff0000; "
        "mov.b32 i, c; mov.b32 j, a; mov.b32 k, d; mov.b32 l, b; "
        "mul.rn.f32 e, e, i; mul.rn.f32 f, f, j; mul.rn.f32 g, g, k; mul.rn.f32 h, h, l; } "
        "cvt.rn.bf16x2.f32 a, f, e; cvt.rn.bf16x2.f32 b, h, g; mov.b64 $0, {a, b}; }",
        "=l,l,l,f", [x, weight, factor], dtype=gl.int64, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _norm_factor(row, eps, K: gl.constexpr, K_PAD: gl.constexpr, WARPS: gl.constexpr):
    """`kernels.gpu.rounding.norm_factor` of a token."""
    EACH: gl.constexpr = min(max(K_PAD // (32 * WARPS), 1), 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout([EACH], [32], [WARPS], [0])
    channels = gl.arange(0, K_PAD, layout=LAYOUT)
    values = gl.load(row + channels, mask=channels < K, other=0.0).to(gl.float32)
    exponent = gl.max(gl.abs(values), 0).to(gl.int32, bitcast=True) & 0x7F800000
    exponent = gl.minimum(gl.maximum(exponent, 1 << 23), 253 << 23)
    unit = exponent.to(gl.float32, bitcast=True)
    scaled = values * ((254 << 23) - exponent).to(gl.float32, bitcast=True)
    total = gl.sum((scaled * scaled * 1099511627776.0).to(gl.int64), 0).to(gl.float32)
    return gl.rsqrt(total * (unit * unit) / (1099511627776.0 * K) + eps)


@gluon.jit
def _tree(smem, first: gl.constexpr, bias, PIECES: gl.constexpr, GROUPS: gl.constexpr, OWN: gl.constexpr):
    """The sums [GROUPS, 8, 4] of pieces, neighbours first; `bias`, unless it is None, joins the first piece."""
    parts = ()
    for i in gl.static_range(PIECES):
        parts = parts + (smem.slice(first + i * GROUPS, GROUPS, 0).load(OWN),)
    if bias is not None:
        parts = (parts[0] + bias,) + parts[1:]
    if PIECES == 8:
        parts = (parts[0] + parts[1], parts[2] + parts[3], parts[4] + parts[5], parts[6] + parts[7])
    if PIECES >= 4:
        parts = (parts[0] + parts[1], parts[2] + parts[3])
    if PIECES >= 2:
        parts = (parts[0] + parts[1],)
    return parts[0]


@gluon.jit
def _finish(
    smem, bias, residual, out, m, n, num_tokens, stride_out, N: gl.constexpr, PIECES: gl.constexpr,
    GROUPS: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ROUND: gl.constexpr,
    OWN: gl.constexpr,
):  # fmt: skip
    """Store the outputs n of tokens m from the sums of all warps."""
    dtype: gl.constexpr = out.dtype.element_ty
    mask = (m < num_tokens) & (n < N)
    b = None
    if BIAS:
        b = gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
    total = _tree(smem, 0, b, PIECES, GROUPS, OWN)
    if GATE != "":
        if BIAS:
            b = gl.load(bias + N + n, mask=n < N, other=0.0).to(gl.float32)
        up = _tree(smem, GROUPS, b, PIECES, GROUPS, OWN).to(dtype).to(gl.float32)
        total = activate(total.to(dtype).to(gl.float32), GATE).to(dtype).to(gl.float32) * up
    if ROUND:
        total = total.to(dtype).to(gl.float32)
    at = m.to(gl.int64) * stride_out + n
    if RESIDUAL:
        total += gl.load(residual + at, mask=mask, other=0.0).to(gl.float32)
    gl.store(out + at, total.to(dtype), mask=mask)


@gluon.jit
def _load_x(at, more, norm, factor, NORM: gl.constexpr, TALL: gl.constexpr):
    """Four channels at pointers, normalised with NORM; with TALL those of the second eight tokens, too."""
    x = gl.load(at)
    if NORM:
        x = _normed(x, gl.load(norm), factor)
    second = x
    if TALL:
        second = gl.load(more)
    return x, second


@gluon.jit
def _add_steps(
    ws, sums, x, more, norm, factor, following,
    STEPS: gl.constexpr, MORE: gl.constexpr, NORM: gl.constexpr, TALL: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """Add the products of tokens, from pointers on, and of weights that are on their way; with MORE as many that follow
    are asked for.
    """
    X_AHEAD: gl.constexpr = min(STEPS, 8)
    xs = ()
    for i in gl.static_range(X_AHEAD):
        xs = xs + (_load_x(x + i * 4, more + i * 4, norm + i * 4, factor, NORM, TALL),)
    for i in gl.static_range(STEPS):
        w = ws[0]
        own = xs[0]
        ws = ws[1:]
        xs = xs[1:]
        if MORE:
            ws = ws + (gl.load(following + i * 4, eviction_policy="evict_first"),)
        if i + X_AHEAD < STEPS:
            at = (i + X_AHEAD) * 4
            xs = xs + (_load_x(x + at, more + at, norm + at, factor, NORM, TALL),)
        sums = _multiply(sums, own[0], own[1], w, BF16)
    return ws, sums


@gluon.jit(do_not_specialize=["num_tokens"])
def _fixed_few_kernel(
    x, weight, bias, norm_row, norm_weight, residual, out, eps, num_tokens, stride_x, stride_out,
    N: gl.constexpr, K: gl.constexpr, PIECES: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr,
    WARPS: gl.constexpr, TALL: gl.constexpr, NORM: gl.constexpr, K_PAD: gl.constexpr, GATE: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ROUND: gl.constexpr, BF16: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and weight [N, K], or [2N, K] with GATE, gate rows, then up rows; x, weight and
    norm_weight in words of four channels. M is at most 16 with TALL, else 8; 1 with NORM, and norm_row is x.

    A program has GROUPS of eight outputs, and a warp for each of them and each piece; with GATE two. AHEAD divides the
    instructions of a piece. What is rounded when is said at `_fixed_parts_kernel`.
    """
    OWN: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    WORDS: gl.constexpr = K // 4
    STEPS: gl.constexpr = K // PIECES // 16
    if PDL:
        launch_dependents()
    warp = warps(OWN, WARPS)
    token = middle(OWN, 8)
    four = last(OWN, 4)
    group = warp % GROUPS
    begin = four
    row = gl.program_id(0) * (8 * GROUPS) + group * 8 + token  # a thread's rows and its tokens have the same indices
    row = gl.minimum(row, N - 1)
    if GATE != "":
        row += warp // GROUPS * N
    else:
        begin = four + warp // GROUPS * (WORDS // PIECES)
    from_weight = weight + row.to(gl.int64) * WORDS + begin
    from_x = x + gl.minimum(token, num_tokens - 1) * stride_x + begin
    from_more = x + gl.minimum(token + 8, num_tokens - 1) * stride_x + begin
    from_norm = norm_weight + begin
    ws = ()
    for i in gl.static_range(AHEAD):
        ws = ws + (gl.load(from_weight + i * 4, eviction_policy="evict_first"),)
    if PDL:
        wait_for_inputs()
    factor = eps
    if NORM:
        factor = _norm_factor(norm_row, eps, K, K_PAD, WARPS)
    zero = gl.zeros([WARPS, 8, 4], gl.float32, OWN)
    sums = (zero, zero, zero, zero)
    for at in range(0, STEPS - AHEAD, AHEAD):
        ws, sums = _add_steps(
            ws, sums, from_x + at * 4, from_more + at * 4, from_norm + at * 4, factor, from_weight + (at + AHEAD) * 4,
            AHEAD, True, NORM, TALL, BF16,
        )  # fmt: skip
    rest: gl.constexpr = (STEPS - AHEAD) * 4
    ws, sums = _add_steps(
        ws, sums, from_x + rest, from_more + rest, from_norm + rest, factor, from_weight, AHEAD, False, NORM, TALL, BF16
    )
    for half in gl.static_range(2 if TALL else 1):
        even = gl.allocate_shared_memory(gl.float32, [WARPS, 8, 4], FLAT, sums[2 * half])
        odd = gl.allocate_shared_memory(gl.float32, [WARPS, 8, 4], FLAT, sums[2 * half + 1])
        m = token + 8 * half
        n = gl.program_id(0) * (8 * GROUPS) + warps(OWN, GROUPS) * 8 + 2 * four
        _finish(
            even, bias, residual, out, m, n, num_tokens, stride_out,
            N, PIECES, GROUPS, GATE, BIAS, RESIDUAL, ROUND, OWN,
        )  # fmt: skip
        _finish(
            odd, bias, residual, out, m, n + 1, num_tokens, stride_out,
            N, PIECES, GROUPS, GATE, BIAS, RESIDUAL, ROUND, OWN,
        )  # fmt: skip


class Config(NamedTuple):
    """Groups of eight outputs in a program, and instructions whose weights are on their way."""

    groups: int
    ahead: int


def config(x: Tensor, n: int, gated: bool, pieces: int) -> Config:
    """Return how to divide the outputs: as evenly among multiprocessors as programs of at most four or eight warps
    allow.
    """
    steps, groups, processors = x.shape[1] // pieces // 16, cdiv(n, 8), num_multiprocessors(x.device)
    most = max(4 // pieces, 1) // (2 if gated else 1)
    choices = [1 << i for i in range(most.bit_length() - 1, -1, -1)]
    own = min(choices, key=lambda count: cdiv(cdiv(groups, count), processors) * count)
    ahead = steps if steps <= AHEAD else next(i for i in range(AHEAD // 2, 0, -1) if steps % i == 0)
    return Config(own, ahead)


def supports(x: Tensor, weight: Tensor, out: Tensor, pieces: int) -> bool:
    """Return whether `launch` computes x [M, K], M <= 16, times the weight."""
    return (
        x.dtype == torch.bfloat16  # float16 is not checked yet
        and len(x) <= TOKENS
        and x.shape[1] % (16 * pieces) == out.shape[1] % 8 == 0
        and x.stride(0) % 4 == 0
        and x.data_ptr() % 8 == 0
        and is_hopper(x.device)
    )


def norms(x: Tensor, norm_weight: Tensor) -> bool:
    """Return whether `launch` computes the norm of x before."""
    return len(x) == 1 and x.dtype == norm_weight.dtype == torch.bfloat16


class Normed(NamedTuple):
    """A token [1, K], weight and eps of its RMSNorm; see `norms`."""

    x: Tensor
    weight: Tensor
    eps: float


def launch(
    x: Tensor | Normed,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    rounds: bool = False,
    pieces: int = 1,
    gate: Gate | Literal[""] = "",
) -> None:
    """Compute x [M, K], or its norm with one piece, -> out [M, N], plus `residual`, of the strides of `out`; see
    `supports`.

    rounds: the sums, before the residual is added.
    """
    norm = x if isinstance(x, Normed) else None
    x, norm_weight, eps = norm or (x, x, 0.0)
    assert isinstance(x, Tensor)
    assert isinstance(norm_weight, Tensor)
    num_tokens, k = x.shape
    n = out.shape[1]
    assert x.stride(1) == out.stride(1) == 1
    assert weight.is_contiguous()
    assert not (gate and (residual is not None or pieces > 1))
    assert norm is None or pieces == 1
    groups, ahead = config(x, n, gate != "", pieces)
    num_warps = groups * (2 if gate else pieces)
    words = [each.view(torch.int64) for each in (x, weight, norm_weight)]
    _fixed_few_kernel[(cdiv(n, 8 * groups),)](
        words[0], words[1], weight if bias is None else bias, x, words[2], out if residual is None else residual, out,
        eps, num_tokens, x.stride(0) // 4, out.stride(0), N=n, K=k, PIECES=pieces, GROUPS=groups, AHEAD=ahead,
        WARPS=num_warps, TALL=num_tokens > 8, NORM=norm is not None, K_PAD=next_power_of_2(k), GATE=gate,
        BIAS=bias is not None, RESIDUAL=residual is not None, ROUND=rounds, BF16=x.dtype == torch.bfloat16,
        num_warps=num_warps, **pdl_options(x.device),
    )  # fmt: skip
