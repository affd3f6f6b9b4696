"""Beam search over ordinary requests: which answers to continue, given the likeliest next tokens of each.

Each step asks for one token of every beam, whose prompt and tokens so far are in the prefix cache. Scores are vLLM's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.core.batch import TokenLogprobs
from engine.core.sampling_params import SamplingParams

MAX_BEAM_WIDTH = 10  # twice as many likeliest tokens are looked at, which are as many as a request may ask for
MAX_LENGTH_PENALTY = 10  # either way


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search. `ValueError` names the field that is out of range."""

    beam_width: int  # beams that are continued, and answers
    max_tokens: int  # of an answer
    ignore_eos: bool = False  # go on after an end-of-text token
    temperature: float = 0.0  # as vLLM has it; only 0, for scores are the model's own probabilities
    length_penalty: float = 1.0  # the exponent of the length that scores are divided by; above 0: longer answers win
    include_stop_str_in_output: bool = False  # keep the end-of-text token in the text

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise ValueError(f"beam_width must be in [1, {MAX_BEAM_WIDTH}], got {self.beam_width}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.temperature != 0:
            raise ValueError(f"temperature must be 0 in a beam search, got {self.temperature}")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            most = MAX_LENGTH_PENALTY
            raise ValueError(f"length_penalty must be in [-{most}, {most}], got {self.length_penalty}")

    def step_sampling(self, num_logprobs: int = 0) -> SamplingParams:
        """Of the requests for the next tokens; with at least `num_logprobs` log-probabilities."""
        return SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=max(2 * self.beam_width, num_logprobs),
            detokenize=False,
        )


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer, or the beginning of one."""

    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token
    finish_reason: str = "length"  # "stop": it ends with the last token


class BeamSearch:
    """The search for the best answers to one prompt: `advance` until it `is_over`."""

    def __init__(self, num_prompt_tokens: int, params: BeamSearchParams, end_token_ids: Collection[int]) -> None:
        """`end_token_ids`: those that end an answer, unless `params` ignores them."""
        self._num_prompt_tokens, self._params = num_prompt_tokens, params
        self._ends = frozenset() if params.ignore_eos else frozenset(end_token_ids)
        self._num_steps = 0
        self._ended: list[Beam] = []  # the best of those that have ended
        self.beams = [Beam()]  # to be continued, the likeliest first

    @property
    def is_over(self) -> bool:
        return not self.beams or self._num_steps == self._params.max_tokens

    def advance(self, found: Sequence[TokenLogprobs]) -> None:
        """One token more. `found`: the likeliest next tokens of each of `beams`."""
        width, open_beams = self._params.beam_width, []
        for beam, at in zip(self.beams, found, strict=True):
            likeliest = list(zip(at.top_ids, at.top_logprobs, strict=True))[: 2 * width]
            for rank, (token_id, logprob) in enumerate(likeliest, 1):
                total = beam.cumulative_logprob + logprob
                if token_id in self._ends:
                    self._ended.append(_longer(beam, token_id, total, at, rank, "stop"))
                else:
                    open_beams.append((total, beam, token_id, at, rank))
        best = heapq.nlargest(width, open_beams, key=lambda each: each[0])  # equal ones in the order of beams and ranks
        self.beams = [_longer(beam, token_id, total, at, rank, "length") for total, beam, token_id, at, rank in best]
        self._num_steps += 1
        self._ended = heapq.nlargest(width, self._ended, key=self._score)
        if len(self._ended) == width and self._bound() <= self._score(self._ended[-1]):
            self.beams = []

    def best(self) -> list[Beam]:
        """The answers, the best first: as many as there are, at most `beam_width`."""
        return sorted(self._ended + self.beams, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: Beam) -> float:
        """The prompt counts, a token that ends the answer does not."""
        return self._penalised(beam, len(beam.token_ids) - (beam.finish_reason == "stop"))

    def _penalised(self, beam: Beam, num_tokens: int) -> float:
        return beam.cumulative_logprob / float((self._num_prompt_tokens + num_tokens) ** self._params.length_penalty)

    def _bound(self) -> float:
        """No continuation of a beam will have a higher score: it becomes less likely, and at best as long as may be."""
        if not self.beams:
            return -math.inf
        longest = self._params.max_tokens if self._params.length_penalty > 0 else self._num_steps
        return self._penalised(self.beams[0], longest)


def _longer(beam: Beam, token_id: int, total: float, at: TokenLogprobs, rank: int, finish_reason: str) -> Beam:
    chosen = TokenLogprobs(at.top_logprobs[rank - 1], rank, at.top_ids, at.top_logprobs)
    return Beam([*beam.token_ids, token_id], total, [*beam.logprobs, chosen], finish_reason)
