"""Tensor functions of the logits processors.

Logits are [n, V] float32 and changed in place; -inf excludes a token. Histories are [n, L] token ids: the first
`lengths` [n] of each row are valid, and the first `prompt_lengths` [n] of these are the prompt.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

import kernels

P = ParamSpec("P")
MAX_PENALTY = 1e30
DRY_MAX_MATCH = 50  # longer repetitions are penalised like one of this length
DRY_ELEMENTS = 1 << 26  # most comparisons at a time
COIN = -1  # replaces a token id: random bits of a (seed, position) that no token uses


def unpack_masks(masks: Tensor, vocab_size: int) -> Tensor:
    """Unpack bit masks [n, W] int32, lowest bit first, to [n, V] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks.unsqueeze(2) >> bits) & 1).bool().view(len(masks), -1)[:, :vocab_size]


def _rows_alone(change: Callable[P, None]) -> Callable[P, None]:
    """Return a function of logits [n, V] and parameters [n, ...] that changes rows alone where `kernels.FORMS` says."""

    @functools.wraps(change)
    def apply(*args: P.args, **options: P.kwargs) -> None:
        tensors: tuple[Any, ...] = args
        untyped: Callable[..., None] = change
        step = 1 if kernels.FORMS.rows_alone else max(len(tensors[0]), 1)
        for i in range(0, len(tensors[0]), step):
            untyped(*(each[i : i + step] for each in tensors), **options)

    return apply


def penalize(
    logits: Tensor,
    history: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Apply the repetition penalty to all tokens, then frequency and presence penalties to output tokens; all [n]."""
    column = torch.arange(history.shape[1], device=history.device)
    known = column < lengths.unsqueeze(1)
    answered = known & (column >= prompt_lengths.unsqueeze(1))
    counts = torch.zeros_like(logits).scatter_add_(1, history, answered.to(logits.dtype))
    seen = torch.zeros_like(logits).scatter_add_(1, history, known.to(logits.dtype)) > 0
    factor = repetition.unsqueeze(1)
    logits.copy_(torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits))
    logits.sub_(counts * frequency.unsqueeze(1)).sub_((counts > 0) * presence.unsqueeze(1))


@_rows_alone
def dont_repeat(
    logits: Tensor,
    history: Tensor,
    lengths: Tensor,
    breakers: Tensor,
    multiplier: Tensor,
    base: Tensor,
    allowed_length: Tensor,
) -> None:
    """DRY: subtract multiplier * base ** (length - allowed) from a token that would extend a repetition of that length.

    A repetition is an earlier occurrence of the history's last tokens. If a token would extend several, the longest
    counts. breakers [n, V] bool: tokens that end repetitions and are not penalised. All other parameters are [n].
    Penalties are finite, so they exclude no token.
    """
    n, num_tokens = history.shape
    step = max(DRY_ELEMENTS // (num_tokens * DRY_MAX_MATCH), 1)
    for i in range(0, n, step):
        part = slice(i, i + step)
        longest = _longest_repetitions(history[part], lengths[part], breakers[part])
        penalty = multiplier[part, None] * base[part, None] ** (longest - allowed_length[part, None])
        logits[part] -= torch.where(longest >= allowed_length[part, None], penalty.clamp_(max=MAX_PENALTY), 0)


def _longest_repetitions(history: Tensor, lengths: Tensor, breakers: Tensor) -> Tensor:
    """Return the length of the longest repetition that each token would extend [n, V] float32; 0: none."""
    (n, num_tokens), device = history.shape, history.device
    m = min(DRY_MAX_MATCH, num_tokens)
    column = torch.arange(num_tokens, device=device)
    breaks = breakers.gather(1, history)
    padded = torch.cat([history.new_full((n, m - 1), -1), history], 1)
    windows = padded.unfold(1, m, 1)  # [n, L, m]: the last m tokens up to each position
    last = (lengths - 1).view(n, 1, 1).expand(n, 1, m)
    end = windows.gather(1, last)
    stop = torch.cat([breaks.new_zeros((n, m - 1)), breaks], 1).unfold(1, m, 1).gather(1, last)
    end = end.masked_fill(stop | (end < 0), -2)  # matches no token
    differs = torch.where(windows != end, torch.arange(1, m + 1, dtype=torch.int8, device=device), 0)
    matched = m - differs.amax(2).long()
    following = history.roll(-1, 1)
    matched *= (column < lengths.unsqueeze(1) - 1) & ~breaks.roll(-1, 1)
    longest = torch.zeros(breakers.shape, dtype=torch.float32, device=device)
    return longest.scatter_reduce_(1, following, matched.float(), "amax")


def completes(recent: Tensor, num_answered: Tensor, words: Tensor) -> Tensor:
    """Return whether each output ends with all tokens of a word except its last one, [E] bool.

    words [E, m]: left-padded with -1; recent [E, m - 1]: the newest tokens of the sequence; num_answered [E]: the
    number of output tokens. A word that begins in the prompt does not count.
    """
    begins = words[:, :-1]
    m = begins.shape[1]
    answered = torch.arange(m, 0, -1, device=words.device) <= num_answered.unsqueeze(1)
    return (((recent == begins) & answered) | (begins < 0)).all(1)


@_rows_alone
def keep_top_n_sigma(logits: Tensor, sigmas: Tensor) -> None:
    """Drop logits more than `sigmas` [n] standard deviations below the highest; <= 0: none. Ignores -inf."""
    possible = logits > -math.inf
    count = possible.sum(1, keepdim=True)
    mean = logits.masked_fill(~possible, 0).sum(1, keepdim=True) / count
    variance = (logits - mean).masked_fill_(~possible, 0).square_().sum(1, keepdim=True) / count
    sigmas = sigmas.unsqueeze(1)
    floor = logits.amax(1, keepdim=True) - sigmas * variance.sqrt()
    logits.masked_fill_((logits < floor) & (sigmas > 0), -math.inf)


def keep_nucleus(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Apply top_k, top_p and min_p as `kernels.sample` does. Temperatures must be above 0."""
    floor = kernels.sampling_thresholds(logits, temperature, top_k, top_p, min_p)
    logits.masked_fill_(logits < floor.unsqueeze(1), -math.inf)


@_rows_alone
def keep_typical(logits: Tensor, temperature: Tensor, mass: Tensor) -> None:
    """Keep the tokens with surprise closest to the entropy, until they have probability `mass` [n]; ties all stay."""
    logprobs = (logits / temperature.unsqueeze(1)).log_softmax(1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).nan_to_num_(0).sum(1, keepdim=True)
    distance, order = (-logprobs - entropy).abs_().sort(1)
    num_short = (probs.gather(1, order).cumsum(1) < mass.unsqueeze(1)).sum(1, keepdim=True)
    furthest = distance.gather(1, num_short.clamp_(max=logits.shape[1] - 1))
    far = (-logprobs - entropy).abs_() > furthest
    logits.masked_fill_(far & (mass.unsqueeze(1) < 1), -math.inf)


@_rows_alone
def exclude_top_choices(
    logits: Tensor, temperature: Tensor, threshold: Tensor, probability: Tensor, seeds: Tensor, positions: Tensor
) -> None:
    """XTC: with `probability` [n], drop all tokens at least `threshold` [n] likely, except the least likely of them."""
    coin = kernels.random_bits(seeds, positions, torch.tensor(COIN)).double()
    tossed = (coin + 2.0**31 + 0.5) * 2.0**-32 < probability
    probs = (logits / temperature.unsqueeze(1)).softmax(1)
    top = (probs >= threshold.unsqueeze(1)) & (logits > -math.inf)  # excluded tokens do not count
    least = probs.masked_fill(~top, math.inf).amin(1, keepdim=True)
    logits.masked_fill_(top & (probs > least) & tossed.unsqueeze(1), -math.inf)


def reasoning_lengths(history: Tensor, lengths: Tensor, prompt_lengths: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """Return the number of reasoning tokens that each request has generated, [n] int64; -1: not begun, or finished.

    history [n, L] int64. begins, ends [n] int64: the tokens around the reasoning; a `begins` of -1 means that the
    prompt ends inside the reasoning.
    """
    at = torch.arange(history.shape[1], device=history.device)
    generated = (at >= prompt_lengths.unsqueeze(1)) & (at < lengths.unsqueeze(1))
    begin = generated & (history == begins.unsqueeze(1))
    inside = begins < 0
    first = torch.where(inside, prompt_lengths - 1, begin.int().argmax(1))
    over = (generated & (history == ends.unsqueeze(1))).any(1) | ~(inside | begin.any(1))
    return torch.where(over, -1, lengths - first - 1)
