"""Beam search with ordinary requests: selects the beams to continue from the most likely next tokens of each.

Each step requests one token for every beam; the prefix cache holds the prompt and the tokens so far. Scores are vLLM's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.core.batch import TokenLogprobs
from engine.core.params.errors import ParameterError
from engine.core.params.sampling import SamplingParams

MAX_BEAM_WIDTH = 10  # each step examines twice as many tokens, the most that a request may ask for
MAX_LENGTH_PENALTY = 10  # in absolute value


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search. Raises `ParameterError` for a field out of range."""

    beam_width: int  # number of beams, and of completions
    max_tokens: int  # of each completion
    ignore_eos: bool = False  # go on after an end-of-text token
    temperature: float = 0.0  # for compatibility with vLLM: must be 0, because scores are the model's own probabilities
    length_penalty: float = 1.0  # scores are divided by length ** length_penalty; above 0 favours longer completions
    include_stop_str_in_output: bool = False  # keep the end-of-text token in the text

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise ParameterError("beam_width", f"must be in [1, {MAX_BEAM_WIDTH}], got {self.beam_width}")
        if self.max_tokens < 1:
            raise ParameterError("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if self.temperature != 0:
            raise ParameterError("temperature", f"must be 0 in a beam search, got {self.temperature}")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            most = MAX_LENGTH_PENALTY
            raise ParameterError("length_penalty", f"must be in [-{most}, {most}], got {self.length_penalty}")

    def step_sampling(self, num_logprobs: int = 0) -> SamplingParams:
        """Return parameters for the requests of a step, with at least `num_logprobs` log-probabilities."""
        return SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=max(2 * self.beam_width, num_logprobs),
            detokenize=False,
        )


@dataclass(frozen=True, slots=True)
class Beam:
    """A complete or partial completion."""

    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one for each token
    finish_reason: str = "length"  # "stop": it ends with the last token


class BeamSearch:
    """A search for the best completions of one prompt. Call `advance` until it `is_over`."""

    def __init__(self, num_prompt_tokens: int, params: BeamSearchParams, end_token_ids: Collection[int]) -> None:
        """`end_token_ids`: tokens that end a completion, unless `params.ignore_eos`."""
        self._num_prompt_tokens, self._params = num_prompt_tokens, params
        self._ends = frozenset() if params.ignore_eos else frozenset(end_token_ids)
        self._num_steps = 0
        self._ended: list[Beam] = []  # the best finished beams
        self.beams = [Beam()]  # beams to continue, the most likely first

    @property
    def is_over(self) -> bool:
        return not self.beams or self._num_steps == self._params.max_tokens

    def advance(self, found: Sequence[TokenLogprobs]) -> None:
        """Extend the beams by one token. `found`: the most likely next tokens of each beam."""
        width, open_beams = self._params.beam_width, []
        for beam, at in zip(self.beams, found, strict=True):
            top = list(zip(at.top_ids, at.top_logprobs, strict=True))[: 2 * width]
            for rank, (token_id, logprob) in enumerate(top, 1):
                total = beam.cumulative_logprob + logprob
                if token_id in self._ends:
                    self._ended.append(_longer(beam, token_id, total, at, rank, "stop"))
                else:
                    open_beams.append((total, beam, token_id, at, rank))
        best = heapq.nlargest(width, open_beams, key=lambda each: each[0])  # ties keep the order of beams and ranks
        self.beams = [_longer(beam, token_id, total, at, rank, "length") for total, beam, token_id, at, rank in best]
        self._num_steps += 1
        self._ended = heapq.nlargest(width, self._ended, key=self._score)
        if len(self._ended) == width and self._bound() <= self._score(self._ended[-1]):
            self.beams = []

    def best(self) -> list[Beam]:
        """Return up to `beam_width` completions, the best first."""
        return sorted(self._ended + self.beams, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: Beam) -> float:
        """Return the beam's score. Its length includes the prompt, but no token that ends the completion."""
        return self._penalised(beam, len(beam.token_ids) - (beam.finish_reason == "stop"))

    def _penalised(self, beam: Beam, num_tokens: int) -> float:
        return beam.cumulative_logprob / float((self._num_prompt_tokens + num_tokens) ** self._params.length_penalty)

    def _bound(self) -> float:
        """Return an upper bound of the scores of all continuations: same likelihood, most favourable length."""
        if not self.beams:
            return -math.inf
        longest = self._params.max_tokens if self._params.length_penalty > 0 else self._num_steps
        return self._penalised(self.beams[0], longest)


def _longer(beam: Beam, token_id: int, total: float, at: TokenLogprobs, rank: int, finish_reason: str) -> Beam:
    chosen = TokenLogprobs(at.top_logprobs[rank - 1], rank, at.top_ids, at.top_logprobs)
    return Beam([*beam.token_ids, token_id], total, [*beam.logprobs, chosen], finish_reason)
