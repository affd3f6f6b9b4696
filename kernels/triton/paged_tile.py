"""Device code shared by the attention kernels: one tile of keys and values, gathered through a block table.

Values come in parts, and so do the sums over them: one part, or, where an e4m3 cache is read in PAIRS of channels, the
even channels and the odd ones. Tensor cores want values transposed, and there is an instruction that transposes 16-bit
numbers on the way from shared memory, but none for bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_kv_tile(
    key_base, value_base, table, start, oldest, context_len, stride_block, stride_token, DTYPE: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """K transposed [D_PAD, TILE] and the parts of V [TILE, D_PAD], in DTYPE, of keys [start, start + TILE) of a
    sequence and KV head, without the scales of an e4m3 cache.

    Unmasked, every key must lie inside the context and, with a WINDOW, not before `oldest`. Masked, other keys are 0:
    neither their slots nor their entries of the block table are read.
    """
    positions = start + tl.arange(0, TILE)
    inside = positions < context_len
    if WINDOW > 0:
        inside &= positions >= oldest
    d = tl.arange(0, D_PAD)
    if PAGE % TILE == 0:  # the tile lies in one block
        block = tl.load(table + start // PAGE).to(tl.int64)
    elif MASKED:
        block = tl.load(table + positions // PAGE, mask=inside, other=0).to(tl.int64)
    else:
        block = tl.load(table + positions // PAGE).to(tl.int64)
    offsets = block * stride_block + (positions % PAGE) * stride_token
    k = _load(key_base + offsets[None, :] + d[:, None], inside[None, :], d[:, None], HEAD_DIM, D_PAD, MASKED).to(DTYPE)
    if PAIRS:
        pair_base = value_base.to(tl.pointer_type(tl.int16), bitcast=True)
        pair_offsets = block * (stride_block // 2) + (positions % PAGE) * (stride_token // 2)
        pair = tl.arange(0, D_PAD // 2)
        at = pair_base + pair_offsets[:, None] + pair[None, :]
        even, odd = _channels(_load(at, inside[:, None], pair[None, :], HEAD_DIM // 2, D_PAD // 2, MASKED))
        v = (even.to(DTYPE), odd.to(DTYPE))
    else:
        at = value_base + offsets[:, None] + d[None, :]
        v = (_load(at, inside[:, None], d[None, :], HEAD_DIM, D_PAD, MASKED).to(DTYPE),)  # type: ignore[assignment]
    return k, v


@triton.jit
def _load(at, inside, channel, CHANNELS: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(at, mask=inside & (channel < CHANNELS), other=0.0)
    elif CHANNELS != PADDED:
        x = tl.load(at, mask=channel < CHANNELS, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def _channels(pairs):
    """The even and the odd channels, float16, of int16 pairs of e4m3 channels [TILE, D / 2]."""
    if INTERPRETED:
        even = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # a register holds the pairs of two keys, later one channel of both: three instructions for four channels
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 sorted; .reg .b16 even, odd; prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {even, odd}, sorted; "
            "cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd


@triton.jit
def first_local_block(position, SPARSE: tl.constexpr):
    """The first of the newest blocks that a query sees all of. SPARSE: `BlockSparse.constants`."""
    return tl.maximum(position // SPARSE[0] - SPARSE[1] + 1, 0)


@triton.jit
def first_vertical_block(head, SPARSE: tl.constexpr):
    """The first of the blocks, each a stride from the next, that a query head sees wherever it is."""
    return (SPARSE[2] - ((SPARSE[4] + head) * SPARSE[3] + 1) % SPARSE[2]) % SPARSE[2]


@triton.jit
def soft_capped(scores, SOFT_CAP: tl.constexpr):
    """SOFT_CAP * tanh(scores / SOFT_CAP), with a tanh that does not overflow."""
    return SOFT_CAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / SOFT_CAP)) + 1.0))


@triton.jit
def no_sum(M: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr):
    """The parts of the sum of no values."""
    if PAIRS:
        acc = (tl.zeros([M, D_PAD // 2], tl.float32), tl.zeros([M, D_PAD // 2], tl.float32))
    else:
        acc = (tl.zeros([M, D_PAD], tl.float32),)  # type: ignore[assignment]
    return acc


@triton.jit
def fold(scores, v, acc, m, l, PRECISION: tl.constexpr, SUM_BY_DOT: tl.constexpr = False):
    """One online-softmax update: base-2 scores [M, N] and the parts of values [N, D] into those of acc [M, D], and into
    the running maximum m and sum l [M]. SUM_BY_DOT: the tensor core adds up l, in one order whatever the tile."""
    new_m = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(new_m == -float("inf"), 0.0, new_m)  # every key so far is masked
    p = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(m - base)
    if SUM_BY_DOT:
        p = p.to(v[0].dtype)
        ones = tl.full([p.shape[1], 16], 1.0, p.dtype)
        l = tl.fma(l, rescale, tl.max(tl.dot(p, ones, input_precision=PRECISION), 1))
    else:
        l = l * rescale + tl.sum(p, 1)
        p = p.to(v[0].dtype)
    first = tl.dot(p, v[0], acc[0] * rescale[:, None], input_precision=PRECISION)
    if len(v) == 2:
        acc = (first, tl.dot(p, v[1], acc[1] * rescale[:, None], input_precision=PRECISION))
    else:
        acc = (first,)
    return acc, new_m, l


@triton.jit
def normalised(acc, m, l, sinks, mask, SINKS: tl.constexpr):
    """The weighted mean of values from their sum acc [M, D] and the weights' maximum m (base 2) and sum l [M].

    With SINKS the weights of the rows' sinks, whose scores are at pointers [M], join the sum: once, however it was
    split.
    """
    if SINKS:
        l += tl.exp2(tl.load(sinks, mask=mask, other=0.0) * LOG2E - m)
    return acc / tl.where(l > 0, l, 1.0)[:, None]


@triton.jit
def whole_sum(acc):
    """A sum of values [M, D_PAD] from its parts."""
    if len(acc) == 2:
        whole = tl.interleave(acc[0], acc[1])
    else:
        whole = acc[0]
    return whole
