"""A proposer that knows the answers, for tests of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from engine.core.drafts.proposer import Guesses, Proposal
from engine.core.engine_request import EngineRequest


class Answers:
    """Proposes the tokens of known answers, each one right with the probability `truth`."""

    def __init__(self) -> None:
        self.answers: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self.truth, self.rng = 0.0, Random(0)

    def start(self, request: EngineRequest) -> Guesses:
        return _Answer(self, tuple(request.prompt_token_ids), request.sampling.seed or 0)


class _Answer:
    def __init__(self, answers: Answers, prompt: tuple[int, ...], seed: int) -> None:
        self._answers, self._answer = answers, answers.answers.get((prompt, seed), [])
        self._num_prompt = len(prompt)

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        first, rng = len(token_ids) - self._num_prompt, self._answers.rng
        right = (self._answer[first:] + [3] * most)[:most]
        return Proposal([t if rng.random() < self._answers.truth else rng.randrange(250) for t in right])
