"""Low-bit codes to bfloat16 in the layouts of the tensor core."""

# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gpu.codes import (
    E2M1_BYTES,
    E2M1_SMALL,
    E2M1_SMALL_BYTES,
    E2M1_WORDS,
    E4M3,
    E4M3_BYTES,
    INT4,
    INT4_BYTES,
    INT8,
    INT8_BYTES,
    ptx,
)

E4M3_WORDS, INT8_WORDS, INT4_WORDS = ptx(E4M3, "ab"), ptx(INT8, "ab"), ptx(INT4, "abcd")


def _scaled(body: str, results: str, zero: str) -> gl.constexpr:
    """With operands after the word: zero points of low and high codes, and scales of theirs, each twice in a
    register.
    """
    first = 2 * len(results) + 1
    pairs = [(name, first + i * 2 // len(results)) for i, name in enumerate(results)]
    lines = [f"{zero}.bf16x2 {name}, {name}, ${at};" for name, at in pairs if zero]
    lines += [f"mul.rn.bf16x2 {name}, {name}, ${at + 2};" for name, at in pairs]
    return ptx(body + "\n".join(lines), results)


def _shifted(body: str) -> str:
    """INT4 with zero points that are -(136 + zero): the subtraction is done anyway."""
    low_and_high = body.replace("mov.b32 less, 0xc308c308;", "mov.b32 less, $9;\n    mov.b32 more, $10;")
    low_and_high = low_and_high.replace(".reg .b32 one, less;", ".reg .b32 one, less, more;")
    return low_and_high.replace("c, c, one, less", "c, c, one, more").replace("d, d, one, less", "d, d, one, more")


INT4_SCALED = _scaled(_shifted(INT4), "abcd", "")
E2M1_SCALED = _scaled(E2M1_SMALL, "abcd", "")
INT8_SCALED, E4M3_SCALED = _scaled(INT8, "ab", ""), _scaled(E4M3, "ab", "")
INT8_SHIFTED, INT4_SHIFTED = _scaled(INT8, "ab", "sub"), _scaled(INT4, "abcd", "sub")


def _half(body: str, results: str, zero: str = "") -> gl.constexpr:
    """PTX for the low or the high codes; operands after the word: their zero point and scale, each twice in a
    register.
    """
    lines = [f"{zero}.bf16x2 {name}, {name}, $5;" for name in results if zero]
    lines += [f"mul.rn.bf16x2 {name}, {name}, $6;" for name in results]
    return ptx(body + "\n".join(lines), results)


INT4_BY_OPERAND = INT4.replace("0xc308c308", "$5")  # a zero point as in `_shifted`
INT4_LOW, INT4_HIGH = _half(INT4_BY_OPERAND, "ab"), _half(INT4_BY_OPERAND, "cd")
INT4_LOW_SHIFTED, INT4_HIGH_SHIFTED = _half(INT4, "ab", "sub"), _half(INT4, "cd", "sub")
E2M1_LOW, E2M1_HIGH = _half(E2M1_SMALL, "ab"), _half(E2M1_SMALL, "cd")
TWO = gl.constexpr((gl.bfloat16,) * 2)
FOUR = gl.constexpr((gl.bfloat16,) * 4)
EIGHT = gl.constexpr((gl.bfloat16,) * 8)


@gluon.jit
def decode_bytes(codes, KIND: gl.constexpr):
    """uint8 codes → bfloat16 of the low (or only) codes, and of the high ones.

    Of e2m1, a thread must have each four bytes that share bits, in order: the layout's first registers.
    """
    if KIND == "e4m3" or KIND == "int8":
        TEXT: gl.constexpr = E4M3_BYTES if KIND == "e4m3" else INT8_BYTES
        low = gl.inline_asm_elementwise(TEXT, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4)
        return low, low
    else:
        TEXT: gl.constexpr = INT4_BYTES if KIND == "int4" else E2M1_BYTES
        return gl.inline_asm_elementwise(TEXT, "=r,=r,=r,=r,r", [codes], dtype=TWO, is_pure=True, pack=4)


@gluon.jit
def decode_small(codes):
    """uint8 codes of e2m1, as `decode_bytes` needs them → bfloat16 of 2^-126 times the low codes' values, and the high
    ones'.

    Those are subnormal or nearly so.
    """
    return gl.inline_asm_elementwise(E2M1_SMALL_BYTES, "=r,=r,=r,=r,r", [codes], dtype=TWO, is_pure=True, pack=4)


@gluon.jit
def _in_order(a, b, c, d, LAYOUT: gl.constexpr):
    """[warps, rows, words] each → [warps, rows, 4 · words]: a[0], b[0], c[0], d[0], a[1] ..., as the tensor core takes
    them.

    Each of a row's four threads has one piece of its channels. The tensor core takes eight channels at a time.
    """
    WARPS: gl.constexpr = a.shape[0]
    ROWS: gl.constexpr = a.shape[1]
    NUM: gl.constexpr = 4 * a.shape[2]
    values = gl.join(gl.join(a, c), gl.join(b, d)).reshape([WARPS, ROWS, 4, NUM // 32, 8])
    return gl.convert_layout(values.permute([0, 1, 3, 2, 4]).reshape([WARPS, ROWS, NUM]), LAYOUT)


@gluon.jit
def decode_words(words, KIND: gl.constexpr, LAYOUT: gl.constexpr):
    """int32 words of four bytes [warps, rows, words] → [warps, rows, 4 · words] bfloat16, see `_in_order`."""
    if KIND == "e4m3" or KIND == "int8":
        TEXT: gl.constexpr = E4M3_WORDS if KIND == "e4m3" else INT8_WORDS
        a, b, c, d = gl.inline_asm_elementwise(TEXT, "=h,=h,=h,=h,r", [words], dtype=FOUR, is_pure=True, pack=1)
        low = _in_order(a, b, c, d, LAYOUT)
        return low, low
    else:
        TEXT: gl.constexpr = INT4_WORDS if KIND == "int4" else E2M1_WORDS
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words],
            dtype=EIGHT,
            is_pure=True, pack=1,
        )  # fmt: skip
        return _in_order(a, b, c, d, LAYOUT), _in_order(e, f, g, h, LAYOUT)


@gluon.jit
def decode_words_in_order(words, KIND: gl.constexpr, CUT: gl.constexpr, LAYOUT: gl.constexpr):
    """int32 words of four bytes [rows, 16], in layout CUT as [rows, 4, 4] → bfloat16 of the low (or only) codes, and of
    the high ones, [rows, 4, 4, 2, 2] in LAYOUT: a byte's number in its word is twice the last index plus the one
    before.
    """
    cut = gl.convert_layout(words.reshape([words.shape[0], 4, 4]), CUT)
    if KIND == "e4m3" or KIND == "int8":
        TEXT: gl.constexpr = E4M3_WORDS if KIND == "e4m3" else INT8_WORDS
        a, b, c, d = gl.inline_asm_elementwise(TEXT, "=h,=h,=h,=h,r", [cut], dtype=FOUR, is_pure=True, pack=1)
        low = gl.convert_layout(gl.join(gl.join(a, b), gl.join(c, d)), LAYOUT)
        return low, low
    else:
        TEXT: gl.constexpr = INT4_WORDS if KIND == "int4" else E2M1_WORDS
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,r", [cut], dtype=EIGHT, is_pure=True, pack=1
        )
        low = gl.convert_layout(gl.join(gl.join(a, b), gl.join(c, d)), LAYOUT)
        return low, gl.convert_layout(gl.join(gl.join(e, f), gl.join(g, h)), LAYOUT)


@gluon.jit
def packed_scale(scale, KIND: gl.constexpr):
    """A scale as bfloat16, twice in an int32; of e2m1 times 2^94, since its codes are decoded to 2^-126 times their
    values.

    So a weight of e2m1 is 2^-32 times what it stands for: its sums have to be multiplied by 2^32.
    """
    value = scale_of(scale)
    if KIND == "e2m1":
        value *= 19807040628566084398385987584.0
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [value], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def packed_zero(zero, KIND: gl.constexpr):
    """A zero point as `decode_scaled` takes it: an integer of int4 as -(136 + zero), -8 <= zero < 120; else itself, as
    bfloat16.
    """
    if KIND == "int4" and zero.dtype == gl.int8:
        bits = zero.to(gl.int32) + 0xC308
    else:
        bits = zero.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | bits << 16


@gluon.jit
def decode_scaled(
    words, zeros, scales, KIND: gl.constexpr, ZERO: gl.constexpr, FRACTIONS: gl.constexpr, CUT: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Dequantise as `decode_words_in_order`, minus zero points, times scales: each half [rows, 4], packed.

    FRACTIONS: zero points are no integers.
    """
    cut = gl.convert_layout(words.reshape([words.shape[0], 4, 4]), CUT)
    s = scales[0][:, :, None]
    t = scales[len(scales) - 1][:, :, None]
    if KIND == "int4" and not ZERO:
        y = gl.full([1, 1, 1], -0x3CF73CF8, gl.int32, CUT)
        z = y
    elif ZERO:
        y = zeros[0][:, :, None]
        z = zeros[len(zeros) - 1][:, :, None]
    else:
        y = s
        z = t
    if KIND == "e4m3" or KIND == "int8":
        TEXT: gl.constexpr = E4M3_SCALED if KIND == "e4m3" else INT8_SHIFTED if ZERO else INT8_SCALED
        a, b, c, d = gl.inline_asm_elementwise(
            TEXT, "=h,=h,=h,=h,r,r,r,r,r", [cut, y, z, s, t], dtype=FOUR, is_pure=True, pack=1
        )
        low = gl.convert_layout(gl.join(gl.join(a, b), gl.join(c, d)), LAYOUT)
        return low, low
    else:
        OF_INT4: gl.constexpr = INT4_SHIFTED if FRACTIONS else INT4_SCALED
        TEXT: gl.constexpr = OF_INT4 if KIND == "int4" else E2M1_SCALED
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r", [cut, y, z, s, t], dtype=EIGHT, is_pure=True, pack=1
        )
        low = gl.convert_layout(gl.join(gl.join(a, b), gl.join(c, d)), LAYOUT)
        return low, gl.convert_layout(gl.join(gl.join(e, f), gl.join(g, h)), LAYOUT)


@gluon.jit
def decode_half_scaled(
    words, zero, scale, HALF: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr, FRACTIONS: gl.constexpr,
    CUT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Dequantise the low (or only) codes as `decode_scaled`, or with HALF the high ones: `zero` and `scale` are
    theirs.
    """
    cut = gl.convert_layout(words.reshape([words.shape[0], 4, 4]), CUT)
    s = scale[:, :, None]
    z = zero[:, :, None] if ZERO else gl.full([1, 1, 1], -0x3CF73CF8, gl.int32, CUT)
    if KIND == "e4m3" or KIND == "int8":
        TEXT: gl.constexpr = E4M3_SCALED if KIND == "e4m3" else INT8_SHIFTED if ZERO else INT8_SCALED
        a, b, c, d = gl.inline_asm_elementwise(
            TEXT, "=h,=h,=h,=h,r,r,r,r,r", [cut, z, z, s, s], dtype=FOUR, is_pure=True, pack=1
        )
    else:
        LOW_INT4: gl.constexpr = INT4_LOW_SHIFTED if FRACTIONS else INT4_LOW
        HIGH_INT4: gl.constexpr = INT4_HIGH_SHIFTED if FRACTIONS else INT4_HIGH
        LOW: gl.constexpr = LOW_INT4 if KIND == "int4" else E2M1_LOW
        HIGH: gl.constexpr = HIGH_INT4 if KIND == "int4" else E2M1_HIGH
        a, b, c, d = gl.inline_asm_elementwise(
            HIGH if HALF else LOW, "=h,=h,=h,=h,r,r,r", [cut, z, s], dtype=FOUR, is_pure=True, pack=1
        )
    return gl.convert_layout(gl.join(gl.join(a, b), gl.join(c, d)), LAYOUT)


@gluon.jit
def scale_of(loaded):
    """Scales as float32; uint8 ones are e4m3."""
    if loaded.dtype == gl.uint8:
        return (loaded.to(gl.uint32) << 20).to(gl.float32, bitcast=True) * 1.329227995784916e36
    else:
        return loaded.to(gl.float32)
