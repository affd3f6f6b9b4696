"""Products of up to 16 tokens with matrices of few bits, in Gluon, with the norm before and the SwiGLU or sum after them.

As in `kernels.hopper.matmul_few`, a thread loads the codes of a row straight into the registers from which the matrix unit
takes them, and the channels of the tokens in the same order; between the two, codes become bfloat16 by arithmetic on bits,
two at a time. Of codes of four bits, a byte holds channels j and j + K / 2: so a load gives two operands, for two pieces of
x. Scales of groups are applied to the sums of their channels, those of rows at the end.
"""

# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.hopper.matmul_few import MAX_FEW, MAX_OUTPUTS, _has_matrix_unit, _last, _middle, _warps
from kernels.quantized_weight import QuantizedWeight
from kernels.triton.launch import launch_dependents, pdl_options, wait_for_inputs

# Four bytes in a register → two registers of two bfloat16 each. First each byte gets 16 bits of its own: as the high byte
# for e4m3, whose sign is then where it belongs, and 4 bits to the right the rest; as the low byte for integers.
E4M3_TO_BF16 = gl.constexpr("""{
    .reg .b32 a, b, s, t;
    prmt.b32 a, 0, $2, 0x5040;
    prmt.b32 b, 0, $2, 0x7060;
    and.b32 s, a, 0x80008000;
    and.b32 t, b, 0x80008000;
    shr.u32 a, a, 4;
    shr.u32 b, b, 4;
    lop3.b32 a, a, 0x07f007f0, s, 0xea;
    lop3.b32 b, b, 0x07f007f0, t, 0xea;
    mov.b32 s, 0x80008000;
    mov.b32 t, 0x7b807b80;
    fma.rn.bf16x2 $0, a, t, s;
    fma.rn.bf16x2 $1, b, t, s;
}""")  # (bits · 2^120) - 0
INT8_TO_BF16 = gl.constexpr("""{
    .reg .b32 u;
    .reg .f32 a, b, c, d;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 a, u, 0x4b000000, 0x7440;
    prmt.b32 b, u, 0x4b000000, 0x7441;
    prmt.b32 c, u, 0x4b000000, 0x7442;
    prmt.b32 d, u, 0x4b000000, 0x7443;
    sub.f32 a, a, 0f4B000080;
    sub.f32 b, b, 0f4B000080;
    sub.f32 c, c, 0f4B000080;
    sub.f32 d, d, 0f4B000080;
    cvt.rn.bf16x2.f32 $0, b, a;
    cvt.rn.bf16x2.f32 $1, d, c;
}""")  # 2^23 + (code + 128), less 2^23 + 128
INT4_TO_BF16 = gl.constexpr("""{
    .reg .b32 a, b, c, d, one, less;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
    mov.b32 one, 0x3f803f80;
    mov.b32 less, 0xc308c308;
    fma.rn.bf16x2 $0, a, one, less;
    fma.rn.bf16x2 $1, b, one, less;
    fma.rn.bf16x2 $2, c, one, less;
    fma.rn.bf16x2 $3, d, one, less;
}""")  # (128 + code) - 136
E2M1_TO_BF16 = gl.constexpr("""{
    .reg .b32 a, b, c, d, s, t, u, v, big, zero;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shl.b32 s, a, 12;
    shl.b32 t, b, 12;
    shl.b32 u, a, 8;
    shl.b32 v, b, 8;
    shl.b32 c, a, 2;
    shl.b32 d, b, 2;
    shl.b32 a, a, 6;
    shl.b32 b, b, 6;
    and.b32 s, s, 0x80008000;
    and.b32 t, t, 0x80008000;
    and.b32 u, u, 0x80008000;
    and.b32 v, v, 0x80008000;
    lop3.b32 a, a, 0x01c001c0, s, 0xea;
    lop3.b32 b, b, 0x01c001c0, t, 0xea;
    lop3.b32 c, c, 0x01c001c0, u, 0xea;
    lop3.b32 d, d, 0x01c001c0, v, 0xea;
    mov.b32 zero, 0x80008000;
    mov.b32 big, 0x7e807e80;
    fma.rn.bf16x2 $0, a, big, zero;
    fma.rn.bf16x2 $1, b, big, zero;
    fma.rn.bf16x2 $2, c, big, zero;
    fma.rn.bf16x2 $3, d, big, zero;
}""")  # (bits · 2^126) - 0


@gluon.jit
def _decode(codes, KIND: gl.constexpr):
    """uint8 codes → bfloat16 of the low (or only) codes, and of the high ones."""
    if KIND == "e4m3":
        low = gl.inline_asm_elementwise(E4M3_TO_BF16, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4)
        return low, low
    elif KIND == "int8":
        low = gl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4)
        return low, low
    elif KIND == "int4":
        return gl.inline_asm_elementwise(
            INT4_TO_BF16, "=r,=r,=r,=r,r", [codes], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            E2M1_TO_BF16, "=r,=r,=r,=r,r", [codes], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
        )


@gluon.jit
def _scale_of(loaded):
    """Scales as float32; uint8 ones are e4m3."""
    if loaded.dtype == gl.uint8:
        return (loaded.to(gl.uint32) << 20).to(gl.float32, bitcast=True) * 1.329227995784916e36
    else:
        return loaded.to(gl.float32)


@gluon.jit
def _add_products(
    total, packed, x_low, x_high, scales, zeros,
    SHAPE: gl.constexpr, MMA: gl.constexpr, KIND: gl.constexpr, HALVES: gl.constexpr, GROUPED: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """total + the products of one step's codes and channels."""
    low, high = _decode(packed, KIND)
    if ZERO:
        low = low - zeros[0].to(gl.bfloat16)[:, :, None]
        if HALVES == 2:
            high = high - zeros[1].to(gl.bfloat16)[:, :, None]
    if GROUPED:
        total += mma_v2(low, x_low, gl.zeros(SHAPE, gl.float32, MMA)) * _scale_of(scales[0])[:, :, None]
        if HALVES == 2:
            total += mma_v2(high, x_high, gl.zeros(SHAPE, gl.float32, MMA)) * _scale_of(scales[1])[:, :, None]
    else:
        total = mma_v2(low, x_low, total)
        if HALVES == 2:
            total = mma_v2(high, x_high, total)
    return total


@gluon.jit
def _load_step(
    code_pointers, scale_pointers, zero_pointers, warps, z_warps, i,
    BYTES: gl.constexpr, STEP: gl.constexpr, CHUNK: gl.constexpr, GROUP: gl.constexpr, HALVES: gl.constexpr,
    GROUPED: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """The codes of one step, and the scales and zero points of their groups."""
    packed = gl.load(code_pointers + i * STEP, eviction_policy="evict_first")
    scales = ()
    zeros = ()
    for half in gl.static_range(HALVES):
        if GROUPED:
            scales = scales + (gl.load(scale_pointers + (half * BYTES + i * STEP + warps * CHUNK) // GROUP),)
        if ZERO:
            zeros = zeros + (gl.load(zero_pointers + (half * BYTES + i * STEP + z_warps * CHUNK) // GROUP),)
    return packed, scales, zeros


@gluon.jit(do_not_specialize=["num_tokens"])
def _few_quantized_kernel(
    x, codes, scale, zero, factor, bias, norm_weight, residual, out, eps, num_tokens, stride_x, stride_out,
    N: gl.constexpr, K: gl.constexpr, M: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    HALVES: gl.constexpr, ZERO: gl.constexpr, FACTOR: gl.constexpr,
    BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
    NORM: gl.constexpr, SWIGLU: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [M, N] from x [M, K] and codes of N rows, or of 2N with SWIGLU: gate rows, then up rows.

    A warp takes CHUNK bytes of codes at a time. Weights are the rows of the matrix unit's tile and tokens its columns. Rows
    of the tile beyond the tokens (or the weight) repeat the last one, and are not stored.
    """
    BYTES: gl.constexpr = K // HALVES
    STEP: gl.constexpr = CHUNK * WARPS
    STEPS: gl.constexpr = BYTES // STEP
    GROUPED: gl.constexpr = GROUP < K
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    W: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    S: gl.constexpr = gl.SliceLayout(2, MMA)
    Z: gl.constexpr = gl.SliceLayout(2, W)
    SHAPE: gl.constexpr = [WARPS, BLOCK_N, M]
    LANES: gl.constexpr = min(BLOCK_N, 32)
    SUM: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, LANES, 32 // LANES], [1, 1, WARPS], [1, 2, 0])
    ROWS_OF_SUM: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, SUM))
    TOKENS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, SUM))
    first = gl.program_id(0) * BLOCK_N
    if PDL:
        launch_dependents()
    w_rows = gl.minimum(_middle(W, BLOCK_N), N - 1 - first)
    w_pointers = codes + first.to(gl.int64) * BYTES + w_rows * BYTES + _warps(W, WARPS) * CHUNK + _last(W, CHUNK)
    s_rows = first + gl.minimum(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S)), N - 1 - first)[None, :]
    s_warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, S))[:, None]
    s_pointers = scale + s_rows // ROWS * GROUPS
    z_rows = first + gl.minimum(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, Z)), N - 1 - first)[None, :]
    z_warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, Z))[:, None]
    z_pointers = zero + z_rows * GROUPS
    x_rows = gl.minimum(_last(X, M), num_tokens - 1)
    x_channels = _warps(X, WARPS) * CHUNK + _middle(X, CHUNK)
    x_pointers = x + x_rows * stride_x + x_channels
    g_pointers = norm_weight + x_channels
    up_w = w_pointers + N * BYTES
    up_s = scale + (N + s_rows) // ROWS * GROUPS
    up_z = z_pointers + N * GROUPS
    n = (first + gl.arange(0, BLOCK_N, layout=ROWS_OF_SUM))[:, None]
    m = gl.arange(0, M, layout=TOKENS)[None, :]
    row = gl.minimum(n, N - 1)
    at = m * stride_out + n
    mask = (m < num_tokens) & (n < N)

    ahead = ()
    ups = ()
    for i in gl.static_range(AHEAD):
        ahead = ahead + (
            _load_step(
                w_pointers,
                s_pointers,
                z_pointers,
                s_warps,
                z_warps,
                i,
                BYTES,
                STEP,
                CHUNK,
                GROUP,
                HALVES,
                GROUPED,
                ZERO,
            ),
        )
        if SWIGLU:
            ups = ups + (
                _load_step(up_w, up_s, up_z, s_warps, z_warps, i, BYTES, STEP, CHUNK, GROUP, HALVES, GROUPED, ZERO),
            )
    if PDL:
        wait_for_inputs()
    if RESIDUAL:
        before = gl.load(residual + at, mask=mask, other=0.0)
    total = gl.zeros(SHAPE, gl.float32, MMA)
    up_total = gl.zeros(SHAPE, gl.float32, MMA)
    if NORM:
        squares = gl.zeros([WARPS, CHUNK, M], gl.float32, X)
    for i in gl.static_range(STEPS):
        step = ahead[0]
        ahead = ahead[1:]
        if i + AHEAD < STEPS:
            ahead = ahead + (
                _load_step(
                    w_pointers, s_pointers, z_pointers, s_warps, z_warps, i + AHEAD,
                    BYTES, STEP, CHUNK, GROUP, HALVES, GROUPED, ZERO,
                ),
            )  # fmt: skip
        if SWIGLU:
            up_step = ups[0]
            ups = ups[1:]
            if i + AHEAD < STEPS:
                ups = ups + (
                    _load_step(
                        up_w, up_s, up_z, s_warps, z_warps, i + AHEAD, BYTES, STEP, CHUNK, GROUP, HALVES, GROUPED, ZERO
                    ),
                )
        xs = ()
        for half in gl.static_range(HALVES):
            xi = gl.load(x_pointers + half * BYTES + i * STEP)
            if NORM:
                wide = xi.to(gl.float32)
                squares += wide * wide
                xi = (wide * gl.load(g_pointers + half * BYTES + i * STEP).to(gl.float32)).to(xi.dtype)
            xs = xs + (xi,)
        total = _add_products(
            total, step[0], xs[0], xs[HALVES - 1], step[1], step[2], SHAPE, MMA, KIND, HALVES, GROUPED, ZERO
        )
        if SWIGLU:
            up_total = _add_products(
                up_total,
                up_step[0],
                xs[0],
                xs[HALVES - 1],
                up_step[1],
                up_step[2],
                SHAPE,
                MMA,
                KIND,
                HALVES,
                GROUPED,
                ZERO,
            )

    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    total_smem = gl.allocate_shared_memory(gl.float32, SHAPE, SHARED, total)
    if SWIGLU:
        up_smem = gl.allocate_shared_memory(gl.float32, SHAPE, SHARED, up_total)
    if NORM:
        squares_smem = gl.allocate_shared_memory(gl.float32, [WARPS, M], FLAT, gl.sum(squares, 1))
    result = gl.sum(total_smem.load(SUM), 0)
    if SWIGLU:
        up = gl.sum(up_smem.load(SUM), 0)
    if not GROUPED:
        result *= _scale_of(gl.load(scale + row // ROWS))
        if SWIGLU:
            up *= _scale_of(gl.load(scale + (N + row) // ROWS))
    if FACTOR:
        result *= gl.load(factor + row)
        if SWIGLU:
            up *= gl.load(factor + N + row)
    if NORM:
        mean = gl.sum(squares_smem.load(gl.SliceLayout(1, SUM)), 0) / K
        norm = gl.convert_layout(gl.rsqrt(mean + eps), TOKENS)[None, :]
        result *= norm
        if SWIGLU:
            up *= norm
    if BIAS:
        result += gl.load(bias + row).to(gl.float32)
        if SWIGLU:
            up += gl.load(bias + N + row).to(gl.float32)
    if SWIGLU:
        result = result / (1.0 + gl.exp(-result)) * up
    if RESIDUAL:
        result += before.to(gl.float32)
    gl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


class Config(NamedTuple):
    """How a product is cut up; see `_few_quantized_kernel`. CHUNK times the warps must divide the bytes of a row."""

    block_n: int
    warps: int
    chunk: int
    ahead: int


@functools.cache
def _choose(row_bytes: int, group: int, num_groups: int, swiglu: bool) -> Config | None:
    """Loads into some 64 registers of each thread in flight; a step of a warp within one group."""
    chunk = 64 if num_groups == 1 or group % 64 == 0 else 32
    chunks = row_bytes // chunk
    if row_bytes % chunk or (num_groups > 1 and group % chunk):
        return None
    warps = min(chunks & -chunks, 8)
    in_flight = chunk * (2 if swiglu else 1) * 16 // 128  # registers of a thread for one step's codes
    return Config(16, warps, chunk, max(min(48 // in_flight, chunks // warps), 1))


def config(x: Tensor, weight: QuantizedWeight, swiglu: bool) -> Config | None:
    """How to multiply x [M, K] by the weight; None where this kernel does not apply: see `matmul_few.config`."""
    if (
        x.shape[0] <= MAX_FEW
        and x.dtype == torch.bfloat16
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.order is None
        and len(weight) <= MAX_OUTPUTS * (2 if swiglu else 1)
        and (not swiglu or len(weight) // 2 % weight.rows == 0)
        and _has_matrix_unit(x.device)
    ):
        return _choose(weight.codes.shape[1], weight.group, weight.scale.shape[1], swiglu)
    return None


def launch(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,
    config: Config,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    residual: Tensor | None = None,
) -> None:
    """x [M, K] -> out [M, N], 1 <= M <= MAX_FEW, plus `residual`, which lies in memory as out does; see `config`."""
    num_tokens, n = x.shape[0], out.shape[1]
    codes = weight.codes if weight.codes.dtype == torch.uint8 else weight.codes.view(torch.uint8)
    scale = weight.scale.view(torch.uint8) if weight.scale.dtype == torch.float8_e4m3fn else weight.scale
    assert x.stride(1) == out.stride(1) == 1
    _few_quantized_kernel[(triton.cdiv(n, config.block_n),)](
        x, codes, scale, scale if weight.zero is None else weight.zero, scale if weight.factor is None else weight.factor,
        x if bias is None else bias, x if norm_weight is None else norm_weight, out if residual is None else residual, out,
        eps, num_tokens, x.stride(0), out.stride(0), N=n, K=weight.num_channels, M=max(triton.next_power_of_2(num_tokens), 8),
        KIND=weight.kind, GROUP=weight.group, ROWS=weight.rows, HALVES=2 if codes.shape[1] < weight.num_channels else 1,
        ZERO=weight.zero is not None, FACTOR=weight.factor is not None,
        BLOCK_N=config.block_n, CHUNK=config.chunk, AHEAD=config.ahead, WARPS=config.warps,
        NORM=norm_weight is not None, SWIGLU=swiglu, BIAS=bias is not None, RESIDUAL=residual is not None,
        num_warps=config.warps, **pdl_options(x.device),
    )  # fmt: skip
