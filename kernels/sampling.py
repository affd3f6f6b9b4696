"""Sampling without a sort of the vocabulary, in Triton: exact filter thresholds by bisection, then a Gumbel argmax.

Three kernels, whose grids depend on shapes alone, so that a CUDA graph can hold them:

1. one program for each row finds the lowest logit that the row's filters leave (rows without filters return at once);
2. one program for each row and piece of the vocabulary adds the noise and takes the piece's best token;
3. one program for each row takes the best of its pieces.

Where a grammar has its say, one more kernel goes before them: it masks the logits of the rows that wait for it.

Thresholds are exact: logits map to integers in the same order, and a search over those integers ends at one of them. To
keep the search short, a first pass finds a bound below the threshold, and a second copies the few logits above it aside.
The noise is a pure function of (seed, position, token id); see `kernels.reference.random_bits`.

Sources: Gumbel-max sampling (Gumbel, 1954); the 32-bit mixing constants are from C. Wellons's search (hash-prospector).
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels.launch import launch_dependents, pdl_options, wait_for_inputs

NEG_INF = tl.constexpr(float("-inf"))
PIECE = 4096  # tokens for each program of the second kernel
ROW_BLOCK = 8192  # logits of a row read at once by the first kernel, and how many it can set aside
SEARCH_BLOCK = 2048


@triton.jit
def _load_logits(at, mask):
    """float32 logits; outside the mask and in place of NaN, -inf."""
    x = tl.load(at, mask=mask, other=NEG_INF).to(tl.float32)
    return tl.where(x == x, x, NEG_INF)


@triton.jit
def _to_key(x, SHIFT: tl.constexpr):
    """float32 -> int32 of the same order. SHIFT drops the low bits that the logits' dtype does not have."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _from_key(key, SHIFT: tl.constexpr):
    """The float32 that _to_key maps to `key` and that has none of the dropped bits."""
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
    """The i-th of three keys that part (low, high] in four."""
    return low + ((high - low) * i + 3) // 4


@triton.jit
def _search(
    logits, num, low, high, target, peak, temperature, floor,
    MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key in [low, high] such that the logits at or above it weigh, or count, at least `target`.

    `low` itself must be such a key. low and high are int64: their difference may not fit 32 bits.
    """
    while low < high:
        key_1, key_2, key_3 = _quarter(low, high, 1), _quarter(low, high, 2), _quarter(low, high, 3)
        sum_1 = tl.zeros([BLOCK], tl.float32)
        sum_2 = tl.zeros([BLOCK], tl.float32)
        sum_3 = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, num, BLOCK, num_stages=3):
            offs = start + tl.arange(0, BLOCK)
            x = _load_logits(logits + offs, offs < num)
            key = _to_key(x, SHIFT)
            if MASS:
                weight = _weigh(x, peak, temperature, floor)
            else:
                weight = tl.where(offs < num, 1.0, 0.0)
            sum_1 += tl.where(key >= key_1, weight, 0.0)
            sum_2 += tl.where(key >= key_2, weight, 0.0)
            sum_3 += tl.where(key >= key_3, weight, 0.0)
        if tl.sum(sum_3) >= target:
            low = key_3
        elif tl.sum(sum_2) >= target:
            low = key_2
            high = key_3 - 1
        elif tl.sum(sum_1) >= target:
            low = key_1
            high = key_2 - 1
        else:
            high = key_1 - 1
    return low


@triton.jit
def _threshold_kernel(
    logits, temperature, top_k, top_p, min_p, only, thresholds, aside, stride_row, vocab_size,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, SEARCH_BLOCK: tl.constexpr, ONLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    LOWEST: tl.constexpr = -0x7F800001 >> SHIFT  # the key of -inf
    row = tl.program_id(0)
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    m = tl.load(min_p + row)
    limited = (k > 0) & (k < vocab_size)
    filtered = (t > 0) & (limited | (p < 1) | (m > 0))
    if ONLY:
        filtered &= tl.load(only + row) >= 0
    threshold = NEG_INF
    if filtered:
        at = logits + row.to(tl.int64) * stride_row
        mine = aside + row.to(tl.int64) * BLOCK
        lane = tl.arange(0, BLOCK)

        best = tl.full([BLOCK], NEG_INF, tl.float32)  # of each lane
        for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
            best = tl.maximum(best, _load_logits(at + start + lane, start + lane < vocab_size))
        peak = tl.max(best)
        highest = _to_key(peak, SHIFT).to(tl.int64)
        if m > 0:
            threshold = peak + t * tl.log(m)

        # Every logit that may decide a threshold is at or above `bound`. The k-th largest of the lanes' best is a bound
        # for the k-th largest of all. All tokens below `tail` together weigh at most 1 - p of the likeliest alone.
        tail = NEG_INF
        if p < 1:
            tail = peak + t * tl.log((1 - p) / vocab_size)
        bound = tl.maximum(threshold, tail)
        if limited:
            bound = NEG_INF
            if k <= BLOCK:
                tl.store(mine + lane, best)
                tl.debug_barrier()
                lowest = tl.full([], LOWEST, tl.int64)
                key = _search(mine, BLOCK, lowest, highest, k, peak, t, NEG_INF, False, SHIFT, SEARCH_BLOCK)
                bound = _from_key(key, SHIFT)
                tl.debug_barrier()

        if limited | (p < 1):
            num_aside = 0
            masses = tl.zeros([BLOCK], tl.float32)
            for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
                x = _load_logits(at + start + lane, start + lane < vocab_size)
                masses += _weigh(x, peak, t, threshold)
                kept = ((x >= bound) & (start + lane < vocab_size)).to(tl.int32)
                num_kept = tl.sum(kept)
                if num_kept > 0:
                    to = num_aside + tl.cumsum(kept) - 1
                    tl.store(mine + to, x, mask=(kept > 0) & (to < BLOCK))
                num_aside += num_kept
            mass = tl.sum(masses)
            tl.debug_barrier()

            source = at
            num = vocab_size
            if num_aside <= BLOCK:
                source = mine
                num = num_aside
            if limited:
                low = _to_key(bound, SHIFT).to(tl.int64)
                key = _search(source, num, low, highest, k, peak, t, threshold, False, SHIFT, SEARCH_BLOCK)
                threshold = tl.maximum(threshold, _from_key(key, SHIFT))
                mass = 0.0
                for start in tl.range(0, num, SEARCH_BLOCK):
                    offs = start + tl.arange(0, SEARCH_BLOCK)
                    mass += tl.sum(_weigh(_load_logits(source + offs, offs < num), peak, t, threshold))
            if p < 1:
                low = _to_key(tl.maximum(threshold, tail), SHIFT).to(tl.int64)
                key = _search(source, num, low, highest, p * mass, peak, t, threshold, True, SHIFT, SEARCH_BLOCK)
                threshold = tl.maximum(threshold, _from_key(key, SHIFT))
    tl.store(thresholds + row, threshold)


@triton.jit
def _mask_kernel(
    logits, masks, mask_of, stride_row, num_words, vocab_size, PIECE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row = tl.program_id(0)
    mask = tl.load(mask_of + row)
    if mask >= 0:
        tokens = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        inside = tokens < vocab_size
        words = tl.load(masks + mask.to(tl.int64) * num_words + tokens // 32, mask=inside, other=0)
        at = logits + row.to(tl.int64) * stride_row + tokens
        x = tl.load(at, mask=inside).to(tl.float32)
        tl.store(at, tl.where(((words >> (tokens % 32)) & 1) != 0, x, NEG_INF), mask=inside)  # all: in whole vectors


@triton.jit
def _mix(x, inject):
    """A bijection of uint32 whose output bits each depend on every input bit; see `kernels.reference`."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) ^ inject
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _random_bits(seed, position, tokens):
    """seed int64, position and tokens int32 or int64 -> uint32 of the shape of `tokens`."""
    a = _mix(seed.to(tl.uint32) ^ 0x9E3779B9, 0)
    b = _mix((seed >> 32).to(tl.uint32) ^ a, 0)
    first = _mix(position.to(tl.uint32) ^ b, 0)
    second = _mix(first ^ a, 0)
    return _mix(tokens.to(tl.uint32) ^ first, second)


@triton.jit
def _log(x, FAST: tl.constexpr):
    return libdevice.fast_logf(x) if FAST else tl.log(x)


@triton.jit
def _gumbel(bits, FAST: tl.constexpr):
    """-log(-log(1 - w)) for w uniform in (0, 1); a series takes the place of log(1 - w) where w is small."""
    w = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    small = w * (1.0 + w * (0.5 + w * (0.33333334 + w * 0.25)))
    return -_log(tl.where(w < 0.015625, small, -_log(1.0 - w, FAST)), FAST)


@triton.jit
def _pick_kernel(
    logits, temperature, thresholds, seeds, positions, only, best_values, best_tokens, stride_row, vocab_size,
    PIECE: tl.constexpr, ONLY: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row = tl.program_id(0)
    piece = tl.program_id(1)
    if not ONLY or tl.load(only + row) >= 0:
        tokens = piece * PIECE + tl.arange(0, PIECE)
        x = _load_logits(logits + row.to(tl.int64) * stride_row + tokens, tokens < vocab_size)
        t = tl.load(temperature + row)
        if t > 0:
            noise = _gumbel(_random_bits(tl.load(seeds + row), tl.load(positions + row), tokens), FAST)
            x = tl.where(x >= tl.load(thresholds + row), x * (1.0 / t) + noise, NEG_INF)
        value, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        at = row * tl.num_programs(1) + piece
        tl.store(best_values + at, value)
        tl.store(best_tokens + at, piece * PIECE + index)


@triton.jit
def _reduce_kernel(
    best_values, best_tokens, only, token_ids,
    NUM_PIECES: tl.constexpr, BLOCK: tl.constexpr, ONLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row = tl.program_id(0)
    if not ONLY or tl.load(only + row) >= 0:
        offs = tl.arange(0, BLOCK)
        values = tl.load(best_values + row * NUM_PIECES + offs, mask=offs < NUM_PIECES, other=NEG_INF)
        _, piece = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(token_ids + row, tl.load(best_tokens + row * NUM_PIECES + piece).to(tl.int64))


def _dropped_bits(dtype: torch.dtype) -> int:
    """How many low bits of a float32 are 0 when its value comes from `dtype`."""
    return {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}[dtype]


def sampling_thresholds(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, only: Tensor | None = None
) -> Tensor:
    """The lowest logit that each row may sample -> [B] float32; -inf where nothing filters. The arguments of `sample`."""
    batch, vocab_size = logits.shape
    thresholds = torch.empty(batch, dtype=torch.float32, device=logits.device)
    aside = torch.empty(batch, ROW_BLOCK, dtype=logits.dtype, device=logits.device)
    _threshold_kernel[(batch,)](
        logits, temperature, top_k, top_p, min_p, top_k if only is None else only, thresholds, aside, logits.stride(0),
        vocab_size, SHIFT=_dropped_bits(logits.dtype), BLOCK=ROW_BLOCK, SEARCH_BLOCK=SEARCH_BLOCK, ONLY=only is not None,
        num_warps=16, **pdl_options(logits.device),
    )  # fmt: skip
    return thresholds


def mask_logits(logits: Tensor, masks: Tensor, mask_of: Tensor) -> None:
    """See `kernels.reference.mask_logits`. Rows of logits must be contiguous, the row stride is free."""
    batch, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert masks.is_contiguous()
    if batch:
        _mask_kernel[(batch, triton.cdiv(vocab_size, PIECE))](
            logits, masks, mask_of, logits.stride(0), masks.shape[1], vocab_size,
            PIECE=PIECE, num_warps=4, **pdl_options(logits.device),
        )  # fmt: skip


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    only: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.sample`. Rows of logits must be contiguous, the row stride is free."""
    batch, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert out is not None or only is None
    num_pieces = triton.cdiv(vocab_size, PIECE)
    token_ids = torch.empty(batch, dtype=torch.int64, device=logits.device) if out is None else out
    if batch == 0:
        return token_ids
    thresholds = sampling_thresholds(logits, temperature, top_k, top_p, min_p, only)
    best_values = torch.empty(batch, num_pieces, dtype=torch.float32, device=logits.device)
    best_tokens = torch.empty(batch, num_pieces, dtype=torch.int32, device=logits.device)
    chosen = top_k if only is None else only
    _pick_kernel[(batch, num_pieces)](
        logits, temperature, thresholds, seeds, positions, chosen, best_values, best_tokens, logits.stride(0), vocab_size,
        PIECE=PIECE, ONLY=only is not None, FAST=logits.device.type != "cpu", num_warps=4, **pdl_options(logits.device),
    )  # fmt: skip
    _reduce_kernel[(batch,)](
        best_values, best_tokens, chosen, token_ids, NUM_PIECES=num_pieces, BLOCK=triton.next_power_of_2(num_pieces),
        ONLY=only is not None, num_warps=1, **pdl_options(logits.device),
    )  # fmt: skip
    return token_ids
