"""Low-bit codes to bfloat16 by arithmetic on bits, two at a time."""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# From a register w of four bytes to registers a and b of two bfloat16 each, and of codes of four bits c and d with the
# high ones. First each byte gets 16 bits of its own: as the high byte for e4m3, whose sign is then where it belongs,
# and 4 bits to the right the rest; as the low byte for integers.
E4M3 = """
    .reg .b32 s, t;
    prmt.b32 a, 0, w, 0x5040;
    prmt.b32 b, 0, w, 0x7060;
    and.b32 s, a, 0x80008000;
    and.b32 t, b, 0x80008000;
    shr.u32 a, a, 4;
    shr.u32 b, b, 4;
    lop3.b32 a, a, 0x07f007f0, s, 0xea;
    lop3.b32 b, b, 0x07f007f0, t, 0xea;
    mov.b32 s, 0x80008000;
    mov.b32 t, 0x7b807b80;
    fma.rn.bf16x2 a, a, t, s;
    fma.rn.bf16x2 b, b, t, s;
"""  # (bits · 2^120) - 0
INT8 = """
    .reg .f32 e, f, g, h;
    xor.b32 w, w, 0x80808080;
    prmt.b32 e, w, 0x4b000000, 0x7440;
    prmt.b32 f, w, 0x4b000000, 0x7441;
    prmt.b32 g, w, 0x4b000000, 0x7442;
    prmt.b32 h, w, 0x4b000000, 0x7443;
    sub.f32 e, e, 0f4B000080;
    sub.f32 f, f, 0f4B000080;
    sub.f32 g, g, 0f4B000080;
    sub.f32 h, h, 0f4B000080;
    cvt.rn.bf16x2.f32 a, f, e;
    cvt.rn.bf16x2.f32 b, h, g;
"""  # 2^23 + (code + 128), less 2^23 + 128
INT4 = """
    .reg .b32 one, less;
    prmt.b32 a, w, 0, 0x4140;
    prmt.b32 b, w, 0, 0x4342;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
    mov.b32 one, 0x3f803f80;
    mov.b32 less, 0xc308c308;
    fma.rn.bf16x2 a, a, one, less;
    fma.rn.bf16x2 b, b, one, less;
    fma.rn.bf16x2 c, c, one, less;
    fma.rn.bf16x2 d, d, one, less;
"""  # (128 + code) - 136
# See `kernels.reference.pack_e2m1`. The truth table 0x28 is (0xf0 ^ 0xcc) & 0xaa.
E2M1_SMALL = """
    .reg .b32 s, t, u, v;
    shl.b32 b, w, 3;
    shl.b32 s, w, 6;
    shl.b32 t, w, 2;
    shr.u32 u, w, 3;
    shl.b32 v, w, 1;
    and.b32 a, w, 0x81c081c0;
    and.b32 b, b, 0x81c081c0;
    lop3.b32 c, s, t, 0x81c081c0, 0x28;
    lop3.b32 d, u, v, 0x81c081c0, 0x28;
"""
E2M1 = (
    E2M1_SMALL
    + """
    .reg .b32 big, zero;
    mov.b32 zero, 0x80008000;
    mov.b32 big, 0x7e807e80;
    fma.rn.bf16x2 a, a, big, zero;
    fma.rn.bf16x2 b, b, big, zero;
    fma.rn.bf16x2 c, c, big, zero;
    fma.rn.bf16x2 d, d, big, zero;
"""
)  # (bits · 2^126) - 0


def ptx(body: str, results: str, operand: str = "w, $", halves: bool = True) -> tl.constexpr:
    """Each result is two bfloat16: two operands of 16 bits, if `halves`, or one of 32."""
    count = len(results)
    if halves:
        copies = [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {name};" for i, name in enumerate(results)]
        count *= 2
    else:
        copies = [f"mov.b32 ${i}, {name};" for i, name in enumerate(results)]
    lines = ["{", ".reg .b32 a, b, c, d, w;", f"mov.b32 {operand.replace('$', f'${count}')};", body, *copies, "}"]
    return tl.constexpr("\n".join(lines))


E4M3_BYTES, INT8_BYTES = ptx(E4M3, "ab", halves=False), ptx(INT8, "ab", halves=False)
INT4_BYTES, E2M1_BYTES = ptx(INT4, "abcd", halves=False), ptx(E2M1, "abcd", halves=False)
E2M1_SMALL_BYTES = ptx(E2M1_SMALL, "abcd", halves=False)
E2M1_WORDS = ptx(E2M1, "abcd")
EIGHT = tl.constexpr((tl.bfloat16,) * 8)


@triton.jit
def decode(codes, KIND: tl.constexpr):
    """Codes as `values` takes them → bfloat16 of the low (or only) codes, and of the high ones."""
    if INTERPRETED:
        low, high = values(codes, KIND)
        low, high = low.to(tl.bfloat16), high.to(tl.bfloat16)
    elif KIND == "e4m3":
        low = tl.inline_asm_elementwise(E4M3_BYTES, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        high = low
    elif KIND == "int8":
        low = tl.inline_asm_elementwise(INT8_BYTES, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        high = low
    elif KIND == "int4":
        low, high = tl.inline_asm_elementwise(
            INT4_BYTES, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:  # which bytes of a tensor would share a register is not specified: hence words
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            E2M1_WORDS, "=h,=h,=h,=h,=h,=h,=h,=h,r", [codes], dtype=EIGHT, is_pure=True, pack=1
        )
        low, high = _in_order(a, b, c, d), _in_order(e, f, g, h)
    return low, high


@triton.jit
def values(codes, KIND: tl.constexpr):
    """uint8 codes, or of e2m1 int32 words of four bytes → float32 of the low (or only) codes, and of the high ones.

    Words [..., n] become [..., 4 · n]. The bits of e4m3 and e2m1 are those of a float32 of a far smaller exponent, if
    shifted.
    """
    bits = codes.to(tl.uint32, bitcast=KIND == "e2m1")
    if KIND == "int8":
        low = codes.to(tl.int8, bitcast=True).to(tl.float32)
        high = low
    elif KIND == "e4m3":
        low = ((bits & 0x80) << 24 | (bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        high = low
    elif KIND == "int4":
        low = (bits & 15).to(tl.float32) - 8.0
        high = (bits >> 4).to(tl.float32) - 8.0
    else:
        low = _four(bits, bits << 3)
        high = _four(bits << 6 ^ bits << 2, bits >> 3 ^ bits << 1)
    return low, high


@triton.jit
def _four(a, b):
    """The values of the codes in both halves of a and b, see `kernels.reference.pack_e2m1`."""
    return _in_order(_small(a << 16), _small(a), _small(b << 16), _small(b)) * 8.507059173023462e37  # 2^126


@triton.jit
def _small(bits):
    return (bits & 0x81C00000).to(tl.float32, bitcast=True)


@triton.jit
def _in_order(a, b, c, d):
    """[..., n] each → [..., 4 · n]: a[0], b[0], c[0], d[0], a[1] ..."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
