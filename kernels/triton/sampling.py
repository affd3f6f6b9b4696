"""Sampling without a sort of the vocabulary, in Triton: exact filter thresholds, then a Gumbel argmax.

The thresholds are those of `kernels.triton.thresholds`. Two kernels follow, whose grids depend on shapes alone, so that
a CUDA graph can hold them: one program for each row and piece of the vocabulary adds the noise and takes the piece's
best token, and one for each row takes the best of its pieces. Pieces are compared by keys, as
`kernels.reference.best_keys` describes them; those of several ranks are gathered in between. NaN counts as inf, which
noise leaves as it is: so a row that is not finite is known by its best key. With grammars one more kernel precedes them
all: it masks the logits of the rows that have a mask.

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

from kernels.data import sampling as data
from kernels.data.sampling import Part, SamplingRows
from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.triton.thresholds import is_filtered, sampling_thresholds, to_key

NEG_INF, INF = tl.constexpr(float("-inf")), tl.constexpr(float("inf"))
LARGEST = tl.constexpr(3.4028234e38)  # float32 below inf
ORDER_OF_INF, ORDER_OF_NEG_INF = tl.constexpr(0x7F800000), tl.constexpr(-0x7F800001)  # by `to_key`
LOWEST_KEY = tl.constexpr(-0x7F800001 << 32)
NOT_FINITE, NOTHING_ALLOWED = tl.constexpr(data.NOT_FINITE), tl.constexpr(data.NOTHING_ALLOWED)
PIECE = 4096  # tokens for each program
PLAIN, REST = tl.constexpr(Part.PLAIN.value), tl.constexpr(Part.REST.value)


@triton.jit
def _is_part(temperature, top_k, top_p, min_p, mask_of, row, vocab_size, PART: tl.constexpr):
    """True if this call samples the row."""
    filtered = is_filtered(temperature, top_k, top_p, min_p, row, vocab_size)
    if PART == REST:
        return filtered | (tl.load(mask_of + row) >= 0)
    else:
        return (PART != PLAIN) | (filtered == 0)


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
        tl.store(
            at, tl.where(((words >> (tokens % 32)) & 1) != 0, x, NEG_INF), mask=inside
        )  # allowed ones too: vector stores


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
def _key(value, token):
    """int64 that orders tokens by value, and those of equal value by their ids; see `kernels.reference.best_keys`."""
    order = to_key(tl.where(value == 0, 0.0, value), 0)  # -0.0 equals 0.0
    return (order.to(tl.int64) << 32) - token


@triton.jit
def _token_of(key):
    """The id, int64, or what stands in its place for a row that is at fault."""
    token = -key & 0xFFFFFFFF
    order = (key + token) >> 32
    token = tl.where(order < ORDER_OF_INF, token, NOT_FINITE)
    return tl.where(order > ORDER_OF_NEG_INF, token, NOTHING_ALLOWED)


@triton.jit(do_not_specialize=["first_id"])
def _pick_kernel(
    logits, temperature, top_k, top_p, min_p, mask_of, thresholds, seeds, positions, keys, stride_row, num_columns,
    first_id, vocab_size, PIECE: tl.constexpr, PART: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The key of the best of each piece of the columns, which are the tokens from `first_id` on."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row, piece = tl.program_id(0), tl.program_id(1)
    key = keys + row * tl.num_programs(1) + piece
    if _is_part(temperature, top_k, top_p, min_p, mask_of, row, vocab_size, PART):
        columns = piece * PIECE + tl.arange(0, PIECE)
        tokens = first_id + columns
        at = logits + row.to(tl.int64) * stride_row + columns
        x = tl.load(at, mask=columns < num_columns, other=NEG_INF).to(tl.float32)
        x = tl.where(x == x, x, INF)  # from here on inf stands for NaN too, and nothing else becomes inf
        t = tl.load(temperature + row)
        if t > 0:
            noise = _gumbel(_random_bits(tl.load(seeds + row), tl.load(positions + row), tokens), FAST)
            noisy = tl.where(x < INF, tl.minimum(x * (1.0 / t) + noise, LARGEST), INF)
            if PART == PLAIN:
                x = noisy
            else:
                x = tl.where((x >= tl.load(thresholds + row)) | (x == INF), noisy, NEG_INF)
        value, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(key, _key(value, first_id + piece * PIECE + index))
    elif PART == PLAIN:
        tl.store(key, tl.zeros([], tl.int64))  # that of token 0


@triton.jit
def _reduce_kernel(
    temperature, top_k, top_p, min_p, mask_of, keys, token_ids, vocab_size,
    NUM_KEYS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The token of each row's highest key. Only with REST are there rows without keys, and the filters read."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    row = tl.program_id(0)
    if PART == REST:
        has_keys = _is_part(temperature, top_k, top_p, min_p, mask_of, row, vocab_size, PART)
    else:
        has_keys = True
    if has_keys:
        offs = tl.arange(0, BLOCK)
        key = tl.max(tl.load(keys + row * NUM_KEYS + offs, mask=offs < NUM_KEYS, other=LOWEST_KEY), 0)
        tl.store(token_ids + row, _token_of(key))


def mask_logits(logits: Tensor, masks: Tensor, mask_of: Tensor) -> None:
    """See `kernels.reference.mask_logits`. Rows of logits must be contiguous, the row stride is free."""
    batch, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert masks.is_contiguous()
    if batch:
        _mask_kernel[(batch, cdiv(vocab_size, PIECE))](
            logits, masks, mask_of, logits.stride(0), masks.shape[1], vocab_size,
            PIECE=PIECE, num_warps=4, **pdl_options(logits.device),
        )  # fmt: skip


def sample(
    logits: Tensor,
    rows: SamplingRows,
    part: Part = Part.ALL,
    mask_of: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.sample`. Rows of logits must be contiguous, the row stride is free."""
    batch, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert part != Part.REST or (mask_of is not None and out is not None)
    num_pieces, pdl = cdiv(vocab_size, PIECE), pdl_options(logits.device)
    token_ids = torch.empty(batch, dtype=torch.int64, device=logits.device) if out is None else out
    if batch == 0:
        return token_ids
    filters = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    thresholds = rows.temperature if part == Part.PLAIN else sampling_thresholds(logits, *filters)
    keys = torch.empty(batch, num_pieces, dtype=torch.int64, device=logits.device)
    masks = rows.top_k if mask_of is None else mask_of
    _pick_kernel[batch, num_pieces](
        logits, *filters, masks, thresholds, rows.seeds, rows.positions, keys, logits.stride(0), vocab_size, 0,
        vocab_size, PIECE=PIECE, PART=part.value, FAST=logits.device.type != "cpu", num_warps=4, **pdl,
    )  # fmt: skip
    _reduce_kernel[(batch,)](
        *filters, masks, keys, token_ids, vocab_size,
        NUM_KEYS=num_pieces, BLOCK=next_power_of_2(num_pieces), PART=part.value, num_warps=1, **pdl,
    )  # fmt: skip
    return token_ids


def best_keys(logits: Tensor, rows: SamplingRows, first_id: int, vocab_size: int) -> Tensor:
    """See `kernels.reference.best_keys`. Rows of logits must be contiguous, the row stride is free."""
    batch, n = logits.shape
    assert logits.stride(1) == 1
    num_pieces, num_columns = cdiv(n, PIECE), min(max(vocab_size - first_id, 0), n)
    keys = torch.empty(batch, num_pieces, dtype=torch.int64, device=logits.device)
    if batch:
        _pick_kernel[batch, num_pieces](
            logits, *rows[:4], rows.top_k, rows.temperature, rows.seeds, rows.positions, keys,
            logits.stride(0), num_columns, first_id, vocab_size,
            PIECE=PIECE, PART=Part.PLAIN.value, FAST=logits.device.type != "cpu", num_warps=4,
            **pdl_options(logits.device),
        )  # fmt: skip
    return keys


def best_tokens(keys: Tensor) -> Tensor:
    """See `kernels.reference.best_tokens`. Keys must be contiguous."""
    batch, num_keys = keys.shape
    assert keys.is_contiguous()
    token_ids = torch.empty(batch, dtype=torch.int64, device=keys.device)
    if batch:
        _reduce_kernel[(batch,)](
            keys, keys, keys, keys, keys, keys, token_ids, 0,  # keys in place of what is not read
            NUM_KEYS=num_keys, BLOCK=next_power_of_2(num_keys), PART=Part.PLAIN.value, num_warps=1,
            **pdl_options(keys.device),
        )  # fmt: skip
    return token_ids
