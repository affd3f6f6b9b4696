"""The lowest logit that top_k, top_p and min_p leave of each row, without a sort of the vocabulary, in Triton.

Five kernels, whose grids depend on shapes alone, so that a CUDA graph can hold them. Rows without filters return at
once.

1. A program for each row and part of the vocabulary finds the largest logit of every few tokens, and sums the part's
   weights.
2. One for each row finds from these a lower bound of the threshold.
3. One for each row and piece sets aside the few logits that reach the bound.
4. One for each row searches among those, in registers, if there are few.
5. One for each row does so if there are many: in registers still, or else in the whole row.

Thresholds are exact: logits map to integers in the same order, and a search over those integers ends at one of them.
All sums have a fixed order, so the same logits always give the same threshold.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs

NEG_INF = tl.constexpr(float("-inf"))
PIECE = 4096  # tokens for each program of the first and third kernel
GROUP = 32  # tokens, whose best one is kept
FEW_ASIDE, MANY_ASIDE = 8192, 32768  # logits set aside that the fourth and the fifth search in registers
SEARCH_BLOCK = 2048


@triton.jit
def load_logits(at, mask):
    """float32 logits; outside the mask and in place of NaN, -inf."""
    x = tl.load(at, mask=mask, other=NEG_INF).to(tl.float32)
    return tl.where(x == x, x, NEG_INF)


@triton.jit
def to_key(x, SHIFT: tl.constexpr):
    """float32 -> int32 of the same order. SHIFT drops the low bits that the logits' dtype does not have."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _from_key(key, SHIFT: tl.constexpr):
    """The float32 that to_key maps to `key` and that has none of the dropped bits."""
    ordered = key.to(tl.int32) << SHIFT
    ordered = tl.where(key < 0, ordered | ((1 << SHIFT) - 1), ordered)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(x, peak, temperature, floor):
    """A logit's weight before normalisation: 1 at the peak even if that is infinite, 0 below the floor."""
    weight = tl.where(x == peak, 1.0, tl.exp((x - peak) / temperature))
    return tl.where(x >= floor, weight, 0.0)


@triton.jit
def _quarter(low, high, i):
    """The i-th of three keys that part (low, high] in four. low and high are int64: their difference may not fit 32
    bits.
    """
    return (low + ((high - low) * i + 3) // 4).to(tl.int32)


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p, row, vocab_size):
    """True if any filter applies to the row."""
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    m = tl.load(min_p + row)
    return (t > 0) & (((k > 0) & (k < vocab_size)) | (p < 1) | (m > 0))


@triton.jit
def _narrow(low, high, key_1, key_2, key_3, sum_1, sum_2, sum_3, target):
    """The quarter of [low, high] that holds the largest key at or above which at least `target` is."""
    if sum_3 >= target:
        low = key_3.to(tl.int64)
    elif sum_2 >= target:
        low = key_2.to(tl.int64)
        high = key_3.to(tl.int64) - 1
    elif sum_1 >= target:
        low = key_1.to(tl.int64)
        high = key_2.to(tl.int64) - 1
    else:
        high = key_1.to(tl.int64) - 1
    return low, high


@triton.jit
def _search(x, low, high, target, peak, temperature, floor, MASS: tl.constexpr, SHIFT: tl.constexpr):
    """The largest key in [low, high] such that the logits x [N] at or above it weigh, or count, at least `target`.

    `low` itself must be such a key, as int64. -inf in x counts for nothing above it.
    """
    key = to_key(x, SHIFT)
    weight = _weigh(x, peak, temperature, floor) if MASS else tl.full(x.shape, 1.0, tl.float32)
    while low < high:
        key_1, key_2, key_3 = _quarter(low, high, 1), _quarter(low, high, 2), _quarter(low, high, 3)
        sum_1 = tl.sum(tl.where(key >= key_1, weight, 0.0), 0)
        sum_2 = tl.sum(tl.where(key >= key_2, weight, 0.0), 0)
        sum_3 = tl.sum(tl.where(key >= key_3, weight, 0.0), 0)
        low, high = _narrow(low, high, key_1, key_2, key_3, sum_1, sum_2, sum_3, target)
    return low


@triton.jit
def _search_row(
    logits, num, low, high, target, peak, temperature, floor,
    MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Search as `_search` does, in a whole row in memory."""
    while low < high:
        key_1, key_2, key_3 = _quarter(low, high, 1), _quarter(low, high, 2), _quarter(low, high, 3)
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, num, BLOCK, num_stages=3):
            offs = start + tl.arange(0, BLOCK)
            x = load_logits(logits + offs, offs < num)
            key = to_key(x, SHIFT)
            if MASS:
                weight = _weigh(x, peak, temperature, floor)
            else:
                weight = tl.where(offs < num, 1.0, 0.0)
            sum_1 += tl.where(key >= key_1, weight, 0.0)
            sum_2 += tl.where(key >= key_2, weight, 0.0)
            sum_3 += tl.where(key >= key_3, weight, 0.0)
        low, high = _narrow(
            low, high, key_1, key_2, key_3, tl.sum(sum_1, 0), tl.sum(sum_2, 0), tl.sum(sum_3, 0), target
        )
    return low


@triton.jit
def _tops_kernel(
    logits, temperature, top_k, top_p, min_p, tops, sums, stride_row, vocab_size,
    PIECE: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row = tl.program_id(0)
    if is_filtered(temperature, top_k, top_p, min_p, row, vocab_size):
        piece = tl.program_id(1)
        at = row.to(tl.int64) * tl.num_programs(1) + piece
        tokens = piece * PIECE + tl.arange(0, PIECE)
        x = load_logits(logits + row.to(tl.int64) * stride_row + tokens, tokens < vocab_size)
        best = tl.max(tl.reshape(x, (PIECE // GROUP, GROUP)), 1)
        tl.store(tops + at * (PIECE // GROUP) + tl.arange(0, PIECE // GROUP), best)
        k = tl.load(top_k + row)
        if ((k <= 0) | (k >= vocab_size)) & (tl.load(top_p + row) < 1):
            # Relative to the piece's peak: the row's is not known yet. Tokens beyond the vocabulary weigh nothing.
            weights = _weigh(x, tl.max(best), tl.load(temperature + row), NEG_INF)
            tl.store(sums + at, tl.sum(tl.where(tokens < vocab_size, weights, 0.0)))


@triton.jit
def _bound_kernel(
    temperature, top_k, top_p, min_p, tops, sums, peaks, bounds, thresholds, vocab_size,
    NUM_PIECES: tl.constexpr, PIECES: tl.constexpr, TOPS: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Peak and bound of each row, and the threshold of min_p alone: -inf where it does not filter."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row = tl.program_id(0)
    threshold = NEG_INF
    if is_filtered(temperature, top_k, top_p, min_p, row, vocab_size):
        t = tl.load(temperature + row)
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        m = tl.load(min_p + row)
        pieces = tl.arange(0, PIECES)[:, None]
        inside = (pieces < NUM_PIECES) & (tl.arange(0, TOPS)[None, :] >= 0)
        at = (row.to(tl.int64) * NUM_PIECES + pieces) * TOPS + tl.arange(0, TOPS)[None, :]
        best = tl.load(tops + at, mask=inside, other=NEG_INF).to(tl.float32)
        peak_of = tl.max(best, 1)
        peak = tl.max(peak_of, 0)
        bound = NEG_INF
        if (k > 0) & (k < vocab_size):
            # The k-th largest of the groups' best is a bound for the k-th largest of all.
            if k <= NUM_PIECES * TOPS:
                least = tl.min(tl.min(tl.where(inside, best, peak), 1), 0)
                low, high = to_key(least, SHIFT).to(tl.int64), to_key(peak, SHIFT).to(tl.int64)
                flat = tl.reshape(best, (PIECES * TOPS,))
                bound = _from_key(_search(flat, low, high, k, peak, t, NEG_INF, False, SHIFT), SHIFT)
        elif p < 1:
            # All tokens below the bound together weigh at most 1 - p of all, or of the argmax alone.
            i = tl.arange(0, PIECES)
            own = tl.load(sums + row.to(tl.int64) * NUM_PIECES + i, mask=i < NUM_PIECES, other=0.0)
            total = tl.sum(tl.where(i < NUM_PIECES, own * _weigh(peak_of, peak, t, NEG_INF), 0.0), 0)
            if m > 0:
                total = 1.0
            bound = peak + t * tl.log((1 - p) * 0.99 * total / vocab_size)
        if m > 0:
            threshold = peak + t * tl.log(m)
        tl.store(peaks + row, peak)
        tl.store(bounds + row, bound)
    tl.store(thresholds + row, threshold)


@triton.jit
def _aside_kernel(
    logits, temperature, top_k, top_p, peaks, bounds, thresholds, aside, counts, masses, stride_row, vocab_size,
    PIECE: tl.constexpr, PIECES: tl.constexpr, MANY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row = tl.program_id(0)
    k = tl.load(top_k + row)
    t = tl.load(temperature + row)
    if (t > 0) & (((k > 0) & (k < vocab_size)) | (tl.load(top_p + row) < 1)):
        piece = tl.program_id(1)
        at = row.to(tl.int64) * PIECES + piece
        tokens = piece * PIECE + tl.arange(0, PIECE)
        inside = tokens < vocab_size
        x = load_logits(logits + row.to(tl.int64) * stride_row + tokens, inside)
        if (k <= 0) | (k >= vocab_size):
            weights = _weigh(x, tl.load(peaks + row), t, tl.load(thresholds + row))
            tl.store(masses + at, tl.sum(tl.where(inside, weights, 0.0)))
        kept = (inside & (x >= tl.load(bounds + row))).to(tl.int32)
        num_kept = tl.sum(kept)
        tl.store(counts + at, num_kept)
        if num_kept > 0:
            to = tl.cumsum(kept) - 1
            tl.store(aside + at * MANY + to, x, mask=(kept > 0) & (to < MANY))


@triton.jit
def _load_aside(
    aside, counts, EACH: tl.constexpr, MANY: tl.constexpr, NUM_PIECES: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """Logits that a row's programs have set aside, up to EACH of each [PIECES * EACH]; -inf in between."""
    i = tl.arange(0, PIECES * EACH)
    piece = i // EACH
    inside = i % EACH < tl.load(counts + piece, mask=piece < NUM_PIECES, other=0)
    return tl.load(aside + piece * MANY + i % EACH, mask=inside, other=NEG_INF).to(tl.float32)


@triton.jit
def _find(x, mass, k, p, limited, threshold, bound, peak, t, SHIFT: tl.constexpr):
    """The threshold of top_k and top_p, given that of min_p, among logits x [N]: all that are at or above `bound`.

    mass: what all logits at or above `threshold` weigh, where top_k does not filter.
    """
    highest = to_key(peak, SHIFT).to(tl.int64)
    if limited:
        key = _search(x, to_key(bound, SHIFT).to(tl.int64), highest, k, peak, t, NEG_INF, False, SHIFT)
        threshold = tl.maximum(threshold, _from_key(key, SHIFT))
        mass = tl.sum(_weigh(x, peak, t, threshold), 0)
    if p < 1:
        low = to_key(tl.maximum(threshold, bound), SHIFT).to(tl.int64)
        key = _search(x, low, highest, p * mass, peak, t, threshold, True, SHIFT)
        threshold = tl.maximum(threshold, _from_key(key, SHIFT))
    return threshold


@triton.jit
def _find_in_row(
    at, vocab_size, k, p, limited, threshold, bound, peak, t, mass, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Find as `_find` does, in a whole row in memory."""
    highest = to_key(peak, SHIFT).to(tl.int64)
    if limited:
        low = to_key(bound, SHIFT).to(tl.int64)
        key = _search_row(at, vocab_size, low, highest, k, peak, t, threshold, False, SHIFT, BLOCK)
        threshold = tl.maximum(threshold, _from_key(key, SHIFT))
        mass = 0.0
        for start in tl.range(0, vocab_size, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            x = load_logits(at + offs, offs < vocab_size)
            mass += tl.sum(tl.where(offs < vocab_size, _weigh(x, peak, t, threshold), 0.0), 0)
    if p < 1:
        low = to_key(tl.maximum(threshold, bound), SHIFT).to(tl.int64)
        key = _search_row(at, vocab_size, low, highest, p * mass, peak, t, threshold, True, SHIFT, BLOCK)
        threshold = tl.maximum(threshold, _from_key(key, SHIFT))
    return threshold


@triton.jit
def _threshold_kernel(
    logits, temperature, top_k, top_p, peaks, bounds, thresholds, aside, counts, masses, stride_row, vocab_size,
    NUM_PIECES: tl.constexpr, PIECES: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr, SEARCH_MANY: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Final thresholds of rows whose pieces have each set aside at most FEW logits; with SEARCH_MANY, of the rest."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    limited = (k > 0) & (k < vocab_size)
    if (t > 0) & (limited | (p < 1)):
        own = row.to(tl.int64) * PIECES
        i = tl.arange(0, PIECES)
        most = tl.max(tl.load(counts + own + i, mask=i < NUM_PIECES, other=0), 0)
        if (most > FEW) == SEARCH_MANY:
            peak = tl.load(peaks + row)
            bound = tl.load(bounds + row)
            threshold = tl.load(thresholds + row)
            # Where top_k filters, `_aside_kernel` stored no masses: `_find` computes the mass.
            stored = (i < NUM_PIECES) & (limited == 0)
            mass = tl.sum(tl.load(masses + own + i, mask=stored, other=0.0), 0)
            if not SEARCH_MANY:
                x = _load_aside(aside + own * MANY, counts + own, FEW, MANY, NUM_PIECES, PIECES)
                threshold = _find(x, mass, k, p, limited, threshold, bound, peak, t, SHIFT)
            elif most <= MANY:
                x = _load_aside(aside + own * MANY, counts + own, MANY, MANY, NUM_PIECES, PIECES)
                threshold = _find(x, mass, k, p, limited, threshold, bound, peak, t, SHIFT)
            else:
                at = logits + row.to(tl.int64) * stride_row
                threshold = _find_in_row(at, vocab_size, k, p, limited, threshold, bound, peak, t, mass, SHIFT, BLOCK)
            tl.store(thresholds + row, threshold)


def _dropped_bits(dtype: torch.dtype) -> int:
    """Return the number of low bits of a float32 that are 0 when its value comes from `dtype`."""
    return {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}[dtype]


def sampling_thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest logit that each row may sample -> [B] float32; -inf where nothing filters. The arguments of `sample`.

    The logits' row stride is free.
    """
    (batch, vocab_size), device, stride = logits.shape, logits.device, logits.stride(0)
    num_pieces = cdiv(vocab_size, PIECE)
    pieces = next_power_of_2(num_pieces)
    few, many = (min(max(n // pieces, 1), PIECE) for n in (FEW_ASIDE, MANY_ASIDE))
    shift, pdl = _dropped_bits(logits.dtype), pdl_options(device)
    # Each begins at a multiple of 16 bytes whatever the batch: kernels are compiled for each alignment of their
    # arguments.
    floats = torch.empty(3, cdiv(batch, 4) * 4, dtype=torch.float32, device=device)
    peaks, bounds, thresholds = floats[:, :batch].unbind()
    tops = torch.empty(batch, num_pieces, PIECE // GROUP, dtype=logits.dtype, device=device)
    sums = torch.empty(batch, num_pieces, dtype=torch.float32, device=device)
    aside = torch.empty(batch, pieces, many, dtype=logits.dtype, device=device)
    counts = torch.empty(batch, pieces, dtype=torch.int32, device=device)
    masses = torch.empty(batch, pieces, dtype=torch.float32, device=device)
    filters = temperature, top_k, top_p, min_p
    _tops_kernel[batch, num_pieces](
        logits, *filters, tops, sums, stride, vocab_size, PIECE=PIECE, GROUP=GROUP, num_warps=4, **pdl
    )
    _bound_kernel[(batch,)](
        *filters, tops, sums, peaks, bounds, thresholds, vocab_size,
        NUM_PIECES=num_pieces, PIECES=pieces, TOPS=PIECE // GROUP, SHIFT=shift, num_warps=8, **pdl,
    )  # fmt: skip
    _aside_kernel[batch, num_pieces](
        logits, temperature, top_k, top_p, peaks, bounds, thresholds, aside, counts, masses, stride, vocab_size,
        PIECE=PIECE, PIECES=pieces, MANY=many, num_warps=4, **pdl,
    )  # fmt: skip
    for many_aside, num_warps in ((False, 8), (True, 16)):
        _threshold_kernel[(batch,)](
            logits, temperature, top_k, top_p, peaks, bounds, thresholds, aside, counts, masses, stride, vocab_size,
            NUM_PIECES=num_pieces, PIECES=pieces, FEW=few, MANY=many, SEARCH_MANY=many_aside, SHIFT=shift,
            BLOCK=SEARCH_BLOCK, num_warps=num_warps, **pdl,
        )  # fmt: skip
    return thresholds
