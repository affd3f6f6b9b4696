"""Beam search by its definition, over models whose probabilities are dice."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from engine import BeamSearchParams
from engine.core.batch import TokenLogprobs

Model = Callable[[list[int]], list[float]]  # the log-probabilities of the next token


def chance(seed: int, vocab_size: int) -> Model:
    """Log-probabilities of the tokens below `vocab_size`, by dice that depend on all tokens before."""

    def logprobs(token_ids: list[int]) -> list[float]:
        dice = random.Random(f"{seed} {token_ids}")
        weights = [dice.random() ** 3 for _ in range(vocab_size)]
        return [math.log(weight / math.fsum(weights)) for weight in weights]

    return logprobs


def top_logprobs(logprobs: list[float], most: int) -> TokenLogprobs:
    """The most likely tokens in the engine's form."""
    order = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])[:most]
    return TokenLogprobs(logprobs[order[0]], 1, order, [logprobs[i] for i in order])


def by_definition(model: Model, prompt: list[int], params: BeamSearchParams, end: int) -> list[tuple[list[int], float]]:
    """vLLM's loop, to the last step."""
    beams, ended = [(list[int](), 0.0)], list[tuple[list[int], float]]()

    def score(each: tuple[list[int], float]) -> float:
        tokens = prompt + each[0]
        length = len(tokens) - (tokens[-1] == end and not params.ignore_eos)
        return each[1] / length**params.length_penalty

    for _ in range(params.max_tokens):
        longer = list[tuple[list[int], float]]()
        for tokens, total in beams:
            at = top_logprobs(model(prompt + tokens), 2 * params.beam_width)
            for token_id, logprob in zip(at.top_ids, at.top_logprobs, strict=True):
                is_end = token_id == end and not params.ignore_eos
                (ended if is_end else longer).append(([*tokens, token_id], total + logprob))
        beams = sorted(longer, key=score, reverse=True)[: params.beam_width]
    return sorted(ended + beams, key=score, reverse=True)[: params.beam_width]
