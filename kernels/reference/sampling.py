"""Grammar masks, filters, the counter RNG and Gumbel sampling; log-probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.data.sampling import NOT_FINITE, NOTHING_ALLOWED, Part, SamplingRows
from kernels.reference.precision import to_wide

MIX_A, MIX_B = 0x7FEB352D, 0x846CA68B  # odd multipliers of a 32-bit finaliser


def _int32(x: int) -> int:
    """The 32-bit pattern x as a signed integer."""
    return (x & 0xFFFFFFFF) - ((x & 0x80000000) << 1)


def _fold(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) of int32 seen as unsigned, a new tensor."""
    folded = x >> bits
    folded &= 0xFFFFFFFF >> bits
    folded ^= x
    return folded


def _mix(x: Tensor, inject: Tensor | int = 0) -> Tensor:
    """A bijection of 32-bit integers whose output bits each depend on every input bit. Products wrap."""
    x = _fold(x, 16)
    x *= MIX_A
    x ^= inject
    x = _fold(x, 15)
    x *= _int32(MIX_B)
    return _fold(x, 16)


def random_bits(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The counter RNG: int64 seeds, positions and token ids, whose shapes broadcast -> int32, all 32 bits random.

    A pure function of (seed, position, token id), so a request's noise is the same whatever else is in the batch. Seed
    and position become two 32-bit keys; a token id is mixed with both.
    """
    low, high = (((x << 32) >> 32).to(torch.int32) for x in (seeds, seeds >> 32))
    a = _mix(low ^ _int32(0x9E3779B9))
    b = _mix(high ^ a)
    first = _mix(positions.to(torch.int32) ^ b)
    second = _mix(first ^ a)
    return _mix(token_ids.to(torch.int32) ^ first, second)


def gumbel(bits: Tensor) -> Tensor:
    """Random bits int32 -> Gumbel noise float32: -log(-log(1 - w)), w uniform in (0, 1), finest near 0."""
    w = bits.float().add_(bits < 0, alpha=2.0**32)  # seen as unsigned
    w = w.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return w.neg_().log1p_().neg_().log_().neg_()


def sampling_thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest logit that each row may sample -> [B]; -inf where nothing filters.

    logits [B, V] float32 or float64 without NaN, temperature [B] > 0, the rest as in `sample`. min_p acts first, then
    top_k among its survivors, then top_p on their mass; tokens that tie with the lowest logit all stay.
    """
    vocab_size = logits.shape[1]
    temperature, top_k, top_p, min_p = (x.unsqueeze(1) for x in (temperature, top_k, top_p, min_p))
    finite = torch.finfo(logits.dtype)
    peak = logits.amax(-1, keepdim=True).clamp_(finite.min, finite.max)
    floor = torch.where(min_p > 0, peak + temperature * min_p.log(), -math.inf)
    # All tokens below `tail` together weigh at most 1 - top_p of the argmax alone: top_p's threshold is above.
    tail = torch.where(top_p < 1, peak + temperature * ((1 - top_p) / vocab_size).log(), -math.inf)
    limited = (top_k > 0) & (top_k < vocab_size)
    above = (logits >= torch.maximum(floor, tail)).sum(-1, keepdim=True)
    needed = torch.where(limited, top_k, above).clamp_(min=1)
    ordered = logits.topk(int(needed.max())).values
    floor = torch.maximum(floor, torch.where(limited, ordered.gather(1, needed.long() - 1), floor))

    def weigh(x: Tensor) -> Tensor:
        return ((x - peak) / temperature).exp_().masked_fill_(x < floor, 0)

    if (top_p < 1).any():
        reached = weigh(ordered).cumsum(-1, dtype=torch.float64)
        wanted = top_p * weigh(logits).sum(-1, keepdim=True, dtype=torch.float64)
        last = (reached < wanted).sum(-1, keepdim=True).clamp_(max=ordered.shape[1] - 1)  # the first to reach the mass
        nucleus = torch.where(top_p < 1, ordered.gather(1, last), -math.inf)
        floor = torch.maximum(floor, nucleus)
    return floor.squeeze(1)


def mask_logits(logits: Tensor, masks: Tensor, mask_of: Tensor) -> None:
    """Set the logits [B, V] of the tokens that a row's mask forbids to -inf, in place.

    masks [n, (V + 31) // 32] int32, on the logits' device or in pinned CPU memory: a bit for each token, the lowest
    first, set if it is allowed. mask_of [B] int32: the index of the row's mask; -1: none, every token is allowed.
    """
    rows = (mask_of >= 0).nonzero().squeeze(1)
    masks = masks.to(logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = ((masks[mask_of[rows]].unsqueeze(2) >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(~allowed, -math.inf)


def sample(
    logits: Tensor,
    rows: SamplingRows,
    part: Part = Part.ALL,
    mask_of: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One token per row of logits [B, V] -> token ids [B] int64, in `out` where that is given.

    Tokens that tie at a threshold all stay. The choice is argmax(logit / temperature + Gumbel noise of (seed, position,
    token id)). A row with a NaN or an inf gets NOT_FINITE, a row of nothing but -inf NOTHING_ALLOWED.

    With `Part.PLAIN` the other rows get token 0. With `Part.REST` the other rows of `out` stay as they are; mask_of [B]
    int32 is not -1 for rows with a mask, which `mask_logits` has applied.
    """
    filtered = _is_filtered(rows, logits.shape[1])
    chosen = torch.ones_like(filtered)
    if part is Part.PLAIN:
        chosen = ~filtered
    elif part is Part.REST:
        assert mask_of is not None
        assert out is not None
        chosen = filtered | (mask_of >= 0)
    if out is None:
        out = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    elif part is Part.PLAIN:
        out.zero_()
    if chosen.all():
        return out.copy_(_sample(logits, rows))
    out[chosen] = _sample(logits[chosen], SamplingRows(*(x[chosen] for x in rows)))
    return out


def _is_filtered(rows: SamplingRows, vocab_size: int) -> Tensor:
    temperature, top_k, top_p, min_p, _, _ = rows
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0))


def _sample(logits: Tensor, params: SamplingRows) -> Tensor:
    temperature, top_k, top_p, min_p, seeds, positions = params
    wide = to_wide(logits)
    filtered = ((top_k > 0) & (top_k < wide.shape[1])) | (top_p < 1) | (min_p > 0)
    chosen = mark_faults(torch.zeros(len(wide), dtype=torch.int64, device=wide.device), wide.amax(-1))
    sound, random = chosen == 0, temperature > 0
    for kind, rows in enumerate((sound & ~random, sound & random & ~filtered, sound & random & filtered)):
        if not rows.any():
            continue
        x, t, seed, position = (y[rows] for y in (wide, temperature.unsqueeze(1), seeds, positions))
        if kind == 1:
            x /= t
            x += gumbel(
                random_bits(seed.unsqueeze(1), position.unsqueeze(1), torch.arange(x.shape[1], device=x.device))
            )
        elif kind == 2:  # noise for the few tokens left
            thresholds = sampling_thresholds(x, temperature[rows], top_k[rows], top_p[rows], min_p[rows])
            row, token = (x >= thresholds.unsqueeze(1)).nonzero(as_tuple=True)
            perturbed = x[row, token] / t[row, 0] + gumbel(random_bits(seed[row], position[row], token))
            x = torch.full_like(x, -math.inf).index_put_((row, token), perturbed)
        chosen[rows] = x.argmax(-1)
    return chosen


def _ordered(bits: Tensor) -> Tensor:
    """The bits of float32 as int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def best_keys(logits: Tensor, rows: SamplingRows, first_id: int, vocab_size: int) -> Tensor:
    """The first half of `sample` with `Part.PLAIN`, on a rank with a part of the logits: [B, n] -> keys [B, K] int64.

    The columns are the tokens from `first_id` on. Those at or beyond `vocab_size`, the size of the whole vocabulary,
    are ignored; they may be all. The other arguments are as in `sample`. K depends on n alone. `best_tokens` takes the
    keys of all ranks.

    A key stands for the best token of some columns: of its value, the argument of `sample`'s argmax, and of its id. The
    value's float32 as an integer of the same order is the high half, and the id is subtracted from the whole, so the
    best token has the highest key, and of equal values the lowest id. The value inf stands for NaN, too. Keys of rows
    that are not plain are 0.
    """
    token_ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    wide = to_wide(logits).masked_fill(token_ids >= vocab_size, -math.inf)
    noise = gumbel(random_bits(rows.seeds.unsqueeze(1), rows.positions.unsqueeze(1), token_ids))
    limits = torch.finfo(wide.dtype)
    noisy = (wide / rows.temperature.unsqueeze(1)).add_(noise).clamp_(limits.min, limits.max)
    values = torch.where((rows.temperature > 0).unsqueeze(1) & wide.isfinite(), noisy, wide)
    best, column = values.masked_fill_(values.isnan(), math.inf).float().max(-1)
    order = _ordered(best.masked_fill_(best == 0, 0.0).view(torch.int32))  # -0.0 equals 0.0
    keys = (order.long() << 32) - token_ids[column]
    return keys.masked_fill_(_is_filtered(rows, vocab_size), 0).unsqueeze(1)


def best_tokens(keys: Tensor) -> Tensor:
    """The keys [B, K] of all columns, see `best_keys` -> token ids [B] int64 as of `sample` with `Part.PLAIN`."""
    best = keys.amax(1)
    token_ids = -best & 0xFFFFFFFF
    order = (best + token_ids) >> 32
    return mark_faults(token_ids, _ordered(order.int()).view(torch.float32))


def mark_faults(token_ids: Tensor, highest: Tensor) -> Tensor:
    """Replace a row's token by NOT_FINITE if its maximum is NaN or +inf, by NOTHING_ALLOWED if it is -inf.

    token_ids [B] int64; highest [B]: the row's maximum logit, NaN if any logit is.
    """
    token_ids = token_ids.masked_fill(~(highest < math.inf), NOT_FINITE)
    return token_ids.masked_fill_(highest == -math.inf, NOTHING_ALLOWED)


def greedy_sample(logits: Tensor) -> Tensor:
    """Logits [B, V] → the token with the highest logit of each row [B] int64, the lowest id on ties; faults as in
    `sample`.
    """
    highest, token_ids = logits.max(-1)
    return mark_faults(token_ids, highest)


def store_tokens(newest: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Set `newest` [R] int64 at `rows` [n] int64 to `tokens` [n] int64."""
    newest.scatter_(0, rows, tokens)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Raw logits [B, V] -> (logprob [B], rank [B], top_ids [B, num_top], top_logprobs [B, num_top]).

    token_ids [B] int64: the tokens whose logprob and rank (1: none is likelier) are returned first. The top tokens come
    in order, the most likely first. Logprobs are float32, ranks and ids int64.
    """
    wide = logits.float()
    total = wide.logsumexp(-1, keepdim=True)
    chosen = wide.gather(1, token_ids.long().unsqueeze(1))
    rank = (wide > chosen).sum(-1) + 1
    top, top_ids = wide.topk(num_top)
    return (chosen - total).squeeze(1), rank, top_ids, top - total
