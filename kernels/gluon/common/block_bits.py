"""GGUF's codes to bfloat16, and their scales to float32, by arithmetic on bits; see `kernels.data.block_weight`.

Codes without a sign become 128 + code: the bits of 128 with those of the code. What that adds to a sum is subtracted
from it, see `offset`.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon.common.code_bits import EIGHT, FOUR
from kernels.gpu.codes import ptx

# Registers of two bfloat16: a and b from the low halves of a word's bytes, c and d from the high ones. The truth table
# 0xea is x & y | z; 0xe4 is x & z | y & ~z.
Q4 = """
    shr.u32 c, w, 4;
    shr.u32 b, w, 8;
    shr.u32 d, w, 12;
    lop3.b32 a, w, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
"""


def _with_high(shifts: tuple[str, str, str, str], mask: str) -> str:
    """Return `Q4` with bits from the operand after the word: those of a, b, c and d after these shifts."""
    lines = [
        ".reg .b32 q, r, s, t;",
        *(f"{shift.split()[0]} {name}, $9, {shift.split()[1]};" for shift, name in zip(shifts, "qrst", strict=True)),
        "shr.u32 c, w, 4;",
        "shr.u32 b, w, 8;",
        "shr.u32 d, w, 12;",
    ]
    for name, own, above in zip("abcd", "wbcd", "qrst", strict=True):
        lines.append(f"lop3.b32 {name}, {own}, {above}, 0x000f000f, 0xe4;")
        lines.append(f"lop3.b32 {name}, {name}, {mask}, 0x43004300, 0xea;")
    return "\n".join(lines)


Q5 = _with_high(("shl.b32 4", "shl.b32 2", "shl.b32 3", "shl.b32 1"), "0x001f001f")
Q6 = _with_high(("shl.b32 4", "shl.b32 0", "shl.b32 2", "shr.u32 2"), "0x003f003f")
# 128 + the low seven bits, less 128 or, where the sign is set, 256.
Q8 = """
    .reg .b32 s, t, less;
    mov.b32 less, 0xbf80bf80;
    shr.u32 d, w, 8;
    lop3.b32 s, w, 0x00800080, 0x43004300, 0xea;
    lop3.b32 t, d, 0x00800080, 0x43004300, 0xea;
    lop3.b32 a, w, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, d, 0x007f007f, 0x43004300, 0xea;
    fma.rn.bf16x2 a, s, less, a;
    fma.rn.bf16x2 b, t, less, b;
"""
Q4_WORDS, Q5_WORDS, Q6_WORDS, Q8_WORDS = ptx(Q4, "abcd"), ptx(Q5, "abcd"), ptx(Q6, "abcd"), ptx(Q8, "ab")

# Each byte becomes the low byte of 2^23, as float32.
SELECTED = ("0x7440", "0x7441", "0x7442", "0x7443")
SIX_BIT_WORDS = gl.constexpr("""{
    .reg .b32 p, q, u, v, t;
    and.b32 p, $4, 0x3f3f3f3f;
    and.b32 q, $5, 0x3f3f3f3f;
    shr.u32 u, $4, 2;
    shr.u32 v, $5, 2;
    shr.u32 t, $6, 4;
    lop3.b32 u, $6, u, 0x0f0f0f0f, 0xe4;
    lop3.b32 v, t, v, 0x0f0f0f0f, 0xe4;
    mov.b32 $0, p;
    mov.b32 $2, q;
    and.b32 $1, u, 0x3f3f3f3f;
    and.b32 $3, v, 0x3f3f3f3f;
}""")
BYTE_TIMES = gl.constexpr("{ .reg .f32 f; prmt.b32 f, $1, 0x4b000000, $2; fma.rn.f32 $0, f, $3, $4; }")
SIGNED_BYTE = gl.constexpr("""{
    .reg .b32 w;
    .reg .f32 f;
    xor.b32 w, $1, 0x80808080;
    prmt.b32 f, w, 0x4b000000, $2;
    sub.f32 $0, f, 0f4B000080;
}""")
FOUR_WORDS = gl.constexpr((gl.int32,) * 4)
SIX_BITS = gl.constexpr(
    """{
    .reg .b16 lo, hi;
    .reg .f32 d, e, x, y, f;
    .reg .b32 p, q, s, t, u, v;
    mov.b32 {lo, hi}, $16;
    cvt.f32.f16 d, lo;
    cvt.f32.f16 e, hi;
    mul.f32 e, e, 0f3C000000;
    mul.f32 x, d, 0fCB000000;
    mul.f32 y, e, 0fCB000000;
    and.b32 p, $17, 0x3f3f3f3f;
    and.b32 q, $18, 0x3f3f3f3f;
    shr.u32 u, $17, 2;
    shr.u32 v, $18, 2;
    shr.u32 t, $19, 4;
    lop3.b32 s, $19, u, 0x0f0f0f0f, 0xe4;
    lop3.b32 t, t, v, 0x0f0f0f0f, 0xe4;
    and.b32 s, s, 0x3f3f3f3f;
    and.b32 t, t, 0x3f3f3f3f;
"""
    + "".join(
        f"prmt.b32 f, {bits}, 0x4b000000, {SELECTED[i]};\nfma.rn.f32 ${first + i}, f, {factor}, {less};\n"
        for first, (bits, factor, less) in zip(
            (0, 4, 8, 12), (("p", "d", "x"), ("s", "d", "x"), ("q", "e", "y"), ("t", "e", "y")), strict=True
        )
        for i in range(4)
    )
    + "}"
)  # (2^23 + code) · factor - 2^23 · factor, rounded once; the minima's factor is divided by 128
EIGHT_BITS = gl.constexpr(
    "{\n.reg .b32 p0, p1, p2, p3;\n.reg .f32 f, factor;\nmov.f32 factor, $20;\n"
    + "".join(f"xor.b32 p{word}, ${16 + word}, 0x80808080;\n" for word in range(4))
    + "".join(
        f"prmt.b32 f, p{i // 4}, 0x4b000000, {SELECTED[i % 4]};\nsub.f32 f, f, 0f4B000080;\nmul.f32 ${i}, f, factor;\n"
        for i in range(16)
    )
    + "}"
)  # (2^23 + 128 + code - (2^23 + 128)) · factor


def _scaled(body: str, operand: int, results: str, none: str, minima: bool) -> gl.constexpr:
    """Return PTX with operands from `operand` on: scales of low and high codes, then minima, negative, each twice in a
    register. none: the code of zero, 128 more, negative; "": codes have their values.
    """
    pairs = [(name, operand + i * 2 // len(results)) for i, name in enumerate(results)]
    lines = [".reg .b32 one, none;", "mov.b32 one, 0x3f803f80;", f"mov.b32 none, {none};"] if none else []
    for name, scale in pairs:
        if none:
            lines.append(f"fma.rn.bf16x2 {name}, {name}, one, none;")
        lines.append(
            f"fma.rn.bf16x2 {name}, {name}, ${scale}, ${scale + 2};"
            if minima
            else f"mul.rn.bf16x2 {name}, {name}, ${scale};"
        )
    return ptx(body + "\n".join(lines), results)


Q4_SCALED = _scaled(Q4, 9, "abcd", "0xc300c300", True)
Q5_SCALED = _scaled(Q5, 10, "abcd", "0xc300c300", True)
Q6_SCALED = _scaled(Q6, 10, "abcd", "0xc320c320", False)
Q8_SCALED = _scaled(Q8, 5, "ab", "", False)
SIXTEEN_FLOATS = gl.constexpr((gl.float32,) * 16)
TO_SIXTEEN = gl.constexpr(",".join(["=f"] * 16))


@gluon.constexpr_function
def offset(KIND):
    """Return the factor of a sum of x that is added to the products with its codes; 0: these have their values."""
    return 0.0 if KIND == "q8_0" else -160.0 if KIND == "q6_k" else -128.0


@gluon.jit
def decode_word(words, high, KIND: gl.constexpr, LAYOUT: gl.constexpr):
    """int32 words [warps, rows, 4] → bfloat16 [warps, rows, 16] of the low (or only) halves of bytes, and of the high
    ones. high: the word with the bits above; of q5_k four for each thread's word, of q6_k eight, from the lowest on.
    """
    if KIND == "q8_0":
        a, b, c, d = gl.inline_asm_elementwise(Q8_WORDS, "=h,=h,=h,=h,r", [words], dtype=FOUR, is_pure=True, pack=1)
        low = _side_by_side(a, b, c, d, LAYOUT)
        return low, low
    else:
        if KIND == "q4_k":
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                Q4_WORDS, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=EIGHT, is_pure=True, pack=1
            )
        else:
            TEXT: gl.constexpr = Q5_WORDS if KIND == "q5_k" else Q6_WORDS
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, high], dtype=EIGHT, is_pure=True, pack=1
            )
        return _side_by_side(a, b, c, d, LAYOUT), _side_by_side(e, f, g, h, LAYOUT)


@gluon.jit
def _side_by_side(a, b, c, d, LAYOUT: gl.constexpr):
    """[warps, rows, 4] each → [warps, rows, 16]: a[0], b[0], c[0], d[0], a[1] ..."""
    values = gl.join(gl.join(a, c), gl.join(b, d)).reshape([a.shape[0], a.shape[1], 16])
    return gl.convert_layout(values, LAYOUT)


@gluon.jit
def six_bit_scales(a, b, c, d):
    """Words of the scales of q4_k or q5_k [warps, rows] int32 → the eight groups' scales as float32, and their minima
    by 128.
    """
    return gl.inline_asm_elementwise(
        SIX_BITS, TO_SIXTEEN + ",r,r,r,r", [a, b, c, d], dtype=SIXTEEN_FLOATS, is_pure=True, pack=1
    )


@gluon.jit
def eight_bit_scales(a, b, c, d, factor):
    """Words of the scales of q6_k [warps, rows] int32, and their factor as float32 → those of the sixteen groups."""
    return gl.inline_asm_elementwise(
        EIGHT_BITS, TO_SIXTEEN + ",r,r,r,r,f", [a, b, c, d, factor], dtype=SIXTEEN_FLOATS, is_pure=True, pack=1
    )


@gluon.jit
def six_bit_words(b, c, d):
    """The last three words of the scales of q4_k or q5_k, int32 → words of four bytes: the first four groups' scales
    and the last four's, then their minima.
    """
    return gl.inline_asm_elementwise(
        SIX_BIT_WORDS, "=r,=r,=r,=r,r,r,r", [b, c, d], dtype=FOUR_WORDS, is_pure=True, pack=1
    )


@gluon.jit
def byte_times(words, index, factor):
    """Byte `index`, without a sign, of each word, times the factor, which is float32: rounded once."""
    return gl.inline_asm_elementwise(
        BYTE_TIMES, "=f,r,r,f,f", [words, index + 0x7440, factor, factor * -8388608.0], dtype=gl.float32, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def signed_byte(words, index):
    """Byte `index`, an int8, of each word, as float32."""
    return gl.inline_asm_elementwise(
        SIGNED_BYTE, "=f,r,r", [words, index + 0x7440], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def float16_of(words, HALF: gl.constexpr):
    """The low or the high half of each word, a float16, as float32."""
    return (words >> 16 * HALF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def in_column(x, column, wanted: gl.constexpr):
    """bfloat16 x of one column, zeros in the others; two at a time."""
    mask = gl.where(column == wanted, -1, 0).to(gl.int16)
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def twice(value):
    """A number as bfloat16, twice in an int32."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [value], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def decode_word_scaled(words, high, scales, KIND: gl.constexpr, LAYOUT: gl.constexpr):
    """int32 words [rows, 4, 4] → weights [rows, 4, 4, 2, 2] bfloat16 of the low (or only) halves of bytes, and of the
    high ones: the last index is that of the pair, the one before in it. scales: of the low and the high ones, and
    their minima.
    """
    if KIND == "q8_0":
        a, b, c, d = gl.inline_asm_elementwise(
            Q8_SCALED, "=h,=h,=h,=h,r,r,r", [words, scales[0], scales[0]], dtype=FOUR, is_pure=True, pack=1
        )
        low = gl.convert_layout(gl.join(gl.join(a, b), gl.join(c, d)), LAYOUT)
        return low, low
    else:
        if KIND == "q4_k":
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                Q4_SCALED, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r", [words, scales[0], scales[1], scales[2], scales[3]],
                dtype=EIGHT, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            TEXT: gl.constexpr = Q5_SCALED if KIND == "q5_k" else Q6_SCALED
            a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
                TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r",
                [words, high, scales[0], scales[1], scales[2], scales[3]], dtype=EIGHT, is_pure=True, pack=1,
            )  # fmt: skip
        low = gl.convert_layout(gl.join(gl.join(a, b), gl.join(c, d)), LAYOUT)
        return low, gl.convert_layout(gl.join(gl.join(e, f), gl.join(g, h)), LAYOUT)
