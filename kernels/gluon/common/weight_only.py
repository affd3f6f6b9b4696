"""Weight-only GEMMs on Hopper's tensor cores: how a stage's codes become an operand in registers.

A stage is 64 bytes of codes of each of a warpgroup's 64 rows. With four-bit codes, a byte holds channels j and
j + K / 2, so a stage has two tiles of x. A thread takes 16 bytes of a row at once. Each of the tensor core's four steps
uses four of these bytes, two by two, eight channels apart: so x lies in the order of `place_of`.
"""

# ruff: noqa: RUF005 - Gluon has no unpacking
# mypy: allow-incomplete-defs, allow-untyped-defs, disable-error-code="assignment,misc,no-redef"

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.data.quantized_weight import QuantizedWeight
from kernels.gluon.common.code_bits import decode_scaled, decode_words_in_order, packed_scale, packed_zero, scale_of
from kernels.gpu.launch import cdiv


@triton.jit
def channel_of(place, BYTES: tl.constexpr):
    """The channel that lies at a place of x in order, or BYTES in a half where there is none; see `place_of`."""
    WIDTH: tl.constexpr = (BYTES + 63) // 64 * 64
    at = place % WIDTH
    channel = at // 64 * 64 + at // 2 % 4 * 16 + at // 16 % 4 * 4 + at // 8 % 2 * 2 + at % 2
    return place // WIDTH, channel


@triton.jit
def place_of(channel, BYTES: tl.constexpr):
    """Position of a channel in an ordered row of x.

    Each half of BYTES is padded to a multiple of 64. Of each 64 channels the bits of the number, which count quarters,
    steps, tiles and pairs of channels, are permuted: steps, tiles, quarters, pairs.
    """
    WIDTH: tl.constexpr = (BYTES + 63) // 64 * 64
    c = channel % BYTES
    place = c // 64 * 64 + c // 4 % 4 * 16 + c // 2 % 2 * 8 + c // 16 % 4 * 2 + c % 2
    return channel // BYTES * WIDTH + place


def width(weight: QuantizedWeight) -> int:
    """Return the number of channels of an ordered row of x, with padding."""
    row = weight.codes.shape[-1]
    return weight.num_channels // row * cdiv(row, 64) * 64


@gluon.constexpr_function
def _layout(shape):
    """Layout of words [64, 16], sixteen bytes of a row to each thread; as [64, 4, 4]; and of their codes, [64, 4, 4,
    2, 2].
    """
    more = len(shape) - 3
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    bases = [registers, lanes, [[16, 0, 0], [32, 0, 0]]]
    if more < 0:
        bases = [[[row, 4 * quarter + word] for row, quarter, word in part] for part in bases]
    else:
        bases = [[basis + [0] * more for basis in part] for part in bases]
    if more > 0:
        bases[0] = [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1], *bases[0]]
    return gl.DistributedLinearLayout(*bases, [], shape)


@gluon.constexpr_function
def half_words():
    """The layout of words [32, 16] of the upper or the lower rows, sixteen bytes of a row to each thread."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 16]
    )


@gluon.constexpr_function
def half_sums(num_tokens):
    """The layout of sums [32, tokens] of the upper or the lower rows, as the tensor core leaves them."""
    tokens = [[0, 1], *([0, 8 << i] for i in range(num_tokens.bit_length() - 4))]
    return gl.DistributedLinearLayout(
        tokens, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, num_tokens]
    )


@gluon.jit
def words_of_halves(codes_smem, at, HALF: gl.constexpr):
    """[64, 16], of each sixteen rows eight upper and eight lower ones, so that one thread sums both; from [32, 16] of
    each.
    """
    both = gl.join(codes_smem.index(at).load(HALF), codes_smem.index(at + 1).load(HALF))
    return gl.convert_layout(both.reshape([4, 8, 16, 2]).permute([0, 3, 1, 2]).reshape([64, 16]), _layout([64, 16]))


@gluon.jit
def halves_of_sums(acc, OUT: gl.constexpr):
    """Sums of the upper and of the lower rows, [32, tokens] each, of `words_of_halves`."""
    upper, lower = gl.split(acc.reshape([4, 2, 8, acc.shape[1]]).permute([0, 2, 3, 1]).reshape([32, acc.shape[1], 2]))
    return gl.convert_layout(upper, OUT), gl.convert_layout(lower, OUT)


@gluon.jit
def _operand(w, A: gl.constexpr):
    """Weights [rows, quarters, steps, pairs, pieces] as the operand [rows, 64] of the tensor core."""
    return gl.convert_layout(w.permute([0, 2, 4, 1, 3]).reshape([w.shape[0], 64]), A)


@gluon.jit
def _weights(words, scales, zeros, KIND: gl.constexpr, GROUPED: gl.constexpr, ZERO: gl.constexpr, HALVES: gl.constexpr,
             CUT: gl.constexpr, CODES: gl.constexpr, A: gl.constexpr):  # fmt: skip
    """A step's weights of 64 rows as operands of the tensor core: of the low (or only) codes, and of the high ones."""
    if GROUPED:
        FRACTIONS: gl.constexpr = zeros[0].dtype != gl.int8 if ZERO else False
        scales, zeros = _packed(scales, zeros, KIND, HALVES, ZERO)
        low, high = decode_scaled(words, zeros, scales, KIND, ZERO, FRACTIONS, CUT, CODES)
    else:
        low, high = decode_words_in_order(words, KIND, CUT, CODES)
    low = _operand(low, A)
    if HALVES == 2:
        return low, _operand(high, A)
    else:
        return low, low


@gluon.jit
def _load_scales(
    pointers, zero_pointers, step, row_bytes, GROUP: gl.constexpr, num_groups, HALVES: gl.constexpr,
    ZERO: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """Scales for each quarter of a stage's channels, [rows, 4] for each half; beyond the last group, that group's."""
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, CUT)))[None, :]
    scales = ()
    zeros = ()
    for half in gl.static_range(HALVES):
        at = gl.minimum((half * row_bytes + step * 64 + quarter * 16) // GROUP, num_groups - 1)
        scales = scales + (gl.load(pointers + at),)
        if ZERO:
            zeros = zeros + (gl.load(zero_pointers + at),)
    return scales, zeros


@gluon.jit
def _packed(scales, zeros, KIND: gl.constexpr, HALVES: gl.constexpr, ZERO: gl.constexpr):
    """Scales and zero points as `decode_scaled` takes them."""
    s = ()
    z = ()
    for half in gl.static_range(HALVES):
        s = s + (packed_scale(scales[half], KIND),)
        if ZERO:
            z = z + (packed_zero(zeros[half], KIND),)
    return s, z


@gluon.jit
def _finished(
    acc, scale, factor, bias, n, before,
    N: gl.constexpr, ROWS: gl.constexpr, GROUPED: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr,
    ACC: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """`_scaled` for rows from n on, which stand `before` rows further on in the weight."""
    rows = before + gl.minimum(n + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, ACC)), N - 1)
    return _scaled(acc, scale, factor, bias, rows, ROWS, GROUPED, FACTOR, BIAS, KIND)


@gluon.jit
def _scaled(
    acc, scale, factor, bias, rows,
    ROWS: gl.constexpr, GROUPED: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Sums of the weight's rows with what belongs to the rows."""
    if not GROUPED:
        acc *= scale_of(gl.load(scale + rows // ROWS))[:, None]
    elif KIND == "e2m1":  # see `packed_scale`
        acc *= 4294967296.0
    if FACTOR:
        acc *= gl.load(factor + rows)[:, None]
    if BIAS:
        acc += gl.load(bias + rows).to(gl.float32)[:, None]
    return acc
