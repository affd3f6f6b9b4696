"""Words of `kernels.data.compressed_weight` to bfloat16 in the registers of the tensor core."""

# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EIGHT = gl.constexpr((gl.bfloat16,) * 8)
# Codes' values go down to 2^-126: channels are multiplied by UP, so that their products are normal, and sums by DOWN.
UP, DOWN = gl.constexpr(2.0**64), gl.constexpr(2.0**-64)


def _ptx() -> str:
    """Return PTX for eight weights: operands 8 and 9 hold signs and significands, 10 exponents.

    See `kernels.data.compressed_weight._words`.
    """
    lines = ["{ .reg .b32 a, b, c, d, r, t;"]
    pairs = (
        ("a", "mov.b32 r, $8;", "shl.b32 t, $10, 7;"),
        ("b", "shf.r.wrap.b32 r, $8, $8, 8;", "shl.b32 t, $10, 3;"),
        ("c", "mov.b32 r, $9;", "shr.b32 t, $10, 1;"),
        ("d", "shf.r.wrap.b32 r, $9, $9, 8;", "shr.b32 t, $10, 5;"),
    )
    for i, (name, bits, exponents) in enumerate(pairs):
        lines.append(f"{bits} and.b32 r, r, 0x807f807f; {exponents} and.b32 t, t, 0x07800780; or.b32 {name}, r, t;")
        lines.append(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {name};")
    return "\n".join(lines) + " }"


PTX = gl.constexpr(_ptx())


@gluon.constexpr_function
def piece_layout():
    """The layout of a piece's words [16, 32] of a block of 64 rows: each thread's four side by side."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [], [16, 32]
    )


@gluon.jit
def decode_fragments(first, second, exponents, WARPS: gl.constexpr):
    """Three pieces of int32 words → bfloat16 codes' values [WARPS, 2, 8, 4, 2, 4, 2]: of each warp, its 16 rows by 64
    channels.

    To be reshaped to as many rows as wanted.
    """
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        PTX, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [first, second, exponents], dtype=EIGHT, is_pure=True, pack=1
    )
    values = gl.join(gl.join(gl.join(a, b), gl.join(e, f)), gl.join(gl.join(c, d), gl.join(g, h)))
    # warps, rows mod 8, pairs, sixteens of channels; the pair, its half of the sixteen, its half of the rows
    return values.reshape([WARPS, 8, 4, 4, 2, 2, 2]).permute([0, 6, 1, 3, 5, 2, 4])


@gluon.jit
def listed_value(listed):
    """The bfloat16 of a list's small weights, see `CompressedWeight.small`."""
    return (listed & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def listed_channel(listed):
    return ((listed >> 16) & 0xFFFF).to(gl.int32)


@gluon.jit
def listed_row(listed):
    return (listed >> 32).to(gl.int32)
