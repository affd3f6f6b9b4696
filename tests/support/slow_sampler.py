"""Promises of `SamplingParams` in plain Python loops over one sequence: the oracle of the sampler."""

from __future__ import annotations

import math

import torch

from engine.core.params.sampling import SamplingParams
from kernels import reference

INF = math.inf


def edited_logits(
    raw: list[float],
    tokens: list[int],
    num_prompt: int,
    params: SamplingParams,
    eos: tuple[int, ...],
    mask: set[int] | None = None,
) -> list[float]:
    """The logits that temperature and filters get to see. `mask`: what a grammar allows."""
    logits = list(raw)
    answer = tokens[num_prompt:]
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(answer) < params.min_tokens:
        for token in [*(() if params.ignore_eos else eos), *(params.stop_token_ids or ())]:
            logits[token] = -INF
    for word in params.bad_words or ():
        *begin, last = word  # type: ignore[str-unpack]
        if not begin or answer[-len(begin) :] == begin:
            logits[last] = -INF  # type: ignore[index]
    for token in set(tokens):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(answer):
        logits[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
    if params.dry_multiplier:
        breakers = set(params.dry_sequence_breakers or ())
        for token, length in repetitions(tokens, breakers).items():  # type: ignore[arg-type]
            if length >= params.dry_allowed_length:
                logits[token] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
    for allowed in (set(params.allowed_token_ids) if params.allowed_token_ids else None, mask):
        if allowed is None:
            continue
        if all(logits[t] == -INF for t in allowed):
            logits = list(raw)
        logits = [x if t in allowed else -INF for t, x in enumerate(logits)]
    return logits


def repetitions(tokens: list[int], breakers: set[int]) -> dict[int, int]:
    """For each token that would prolong a repetition of the end of `tokens`: how long the longest one is."""
    found: dict[int, int] = {}
    if tokens[-1] in breakers:
        return found
    for i in range(len(tokens) - 1):
        if tokens[i] != tokens[-1] or tokens[i + 1] in breakers:
            continue
        length = 1
        while length < 50 and i - length >= 0:
            previous = tokens[-(length + 1)]
            if tokens[i - length] != previous or previous in breakers:
                break
            length += 1
        found[tokens[i + 1]] = max(found.get(tokens[i + 1], 0), length)
    return found


def softmax(logits: list[float], temperature: float) -> list[float]:
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def filtered_logits(logits: list[float], params: SamplingParams, coin: float) -> list[float]:
    """Those that may be sampled; the rest is -inf. `coin` in (0, 1) is XTC's."""
    temperature = params.temperature

    def keep(wanted: list[bool]) -> None:
        for t, ok in enumerate(wanted):
            if not ok:
                logits[t] = -INF

    logits = list(logits)
    if params.top_n_sigma > 0:
        finite = [x for x in logits if x > -INF]
        mean = sum(finite) / len(finite)
        sigma = math.sqrt(sum((x - mean) ** 2 for x in finite) / len(finite))
        keep([x >= max(logits) - params.top_n_sigma * sigma for x in logits])
    probs = softmax(logits, temperature)
    keep([p >= params.min_p * max(probs) for p in probs])
    if params.top_k > 0:
        kth = sorted(logits, reverse=True)[min(params.top_k, len(logits)) - 1]
        keep([x >= kth for x in logits])
    if params.top_p < 1:
        keep(_most_likely(softmax(logits, temperature), params.top_p))
    if params.typical_p < 1:
        probs = softmax(logits, temperature)
        surprises = [-math.log(p) if p > 0 else INF for p in probs]
        entropy = sum(p * s for p, s in zip(probs, surprises, strict=True) if p > 0)
        order = sorted(range(len(probs)), key=lambda t: abs(surprises[t] - entropy))
        mass, wanted = 0.0, [False] * len(probs)
        for t in order:
            wanted[t] = True
            mass += probs[t]
            if mass >= params.typical_p:
                break
        keep(wanted)
    if coin < params.xtc_probability:
        probs = softmax(logits, temperature)
        top = [t for t, p in enumerate(probs) if p >= params.xtc_threshold]
        if len(top) >= 2:
            least = min(top, key=lambda t: probs[t])
            keep([t not in top or t == least for t in range(len(probs))])
    return logits


def _most_likely(probs: list[float], mass: float) -> list[bool]:
    wanted, total = [False] * len(probs), 0.0
    for t in sorted(range(len(probs)), key=lambda t: -probs[t]):
        wanted[t] = True
        total += probs[t]
        if total >= mass:
            break
    return wanted


def coin_of(seed: int, position: int) -> float:
    bits = reference.random_bits(torch.tensor(seed), torch.tensor(position), torch.tensor(-1))
    return (int(bits) + 2**31 + 0.5) / 2**32


def next_token(
    raw: list[float],
    tokens: list[int],
    num_prompt: int,
    params: SamplingParams,
    seed: int,
    eos: tuple[int, ...],
    mask: set[int] | None = None,
) -> int:
    logits = edited_logits(raw, tokens, num_prompt, params, eos, mask)
    if params.temperature == 0:
        return logits.index(max(logits))
    position = len(tokens)
    logits = filtered_logits(logits, params, coin_of(seed, position))
    bits = reference.random_bits(torch.tensor(seed), torch.tensor(position), torch.arange(len(logits)))
    noise = reference.gumbel(bits).tolist()
    values = [x / params.temperature + g for x, g in zip(logits, noise, strict=True)]
    return values.index(max(values))
