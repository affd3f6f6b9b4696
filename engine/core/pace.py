"""How long steps take, learnt from those that ran."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.request import Request

SHORT_TOKENS = 16  # a step of at most so many tokens
SHORT_CONTEXT = 1024  # that read the KV of so many takes hardly longer than one of a single token: a short one
DECAY = 7 / 8  # of what a step has taught, with each step after it


class StepPace:
    """A step takes as long as a short one, and more for each token beyond: both as measured lately.

    Long steps count for more than those that are hardly longer than a short one, of which little can be learnt.
    """

    def __init__(self) -> None:
        self._short = 0.0  # seconds of a short step; 0: not known
        self.longest = 0.0  # seconds of the longest step lately
        self._seconds = self._tokens = 0.0  # sums over longer steps: the seconds beyond a short one, and the tokens

    def learn(self, num_tokens: int, seconds: float, requests: Sequence[Request]) -> None:
        """A step that computed that many tokens of these requests took so long."""
        self.longest = max(seconds, DECAY * self.longest)
        if num_tokens > SHORT_TOKENS:
            self._seconds = DECAY * self._seconds + max(seconds - self._short, 0.0)
            self._tokens = DECAY * self._tokens + num_tokens
        elif not self._short:
            self._short = seconds
        elif sum(request.num_computed_tokens for request in requests) <= SHORT_CONTEXT:
            self._short += (1 - DECAY) * (seconds - self._short)

    def num_tokens(self, short_steps: float, least: float = 0.0) -> int:
        """How many tokens make a step take as long as so many short ones, or `least` seconds if that is more.

        At least 1. Before the first longer step that is a guess; 0 where not even short steps are known.
        """
        if not self._short:
            return 0
        each = self._seconds / self._tokens if self._tokens else self._short / SHORT_TOKENS
        seconds = max(short_steps * self._short, least) - self._short
        return max(int(seconds / each), 1) if each else 0
