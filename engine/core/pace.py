"""How long steps take, learnt from those that ran."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.request import Request

SHORT_TOKENS = 16  # a step of at most so many tokens
FIRST_TOKENS = 4 * SHORT_TOKENS
SHORT_CONTEXT = 1024  # that read the KV of so many takes hardly longer than one of a single token: a short one
DECAY = 7 / 8  # of what a step has taught, with each step after it


class StepPace:
    """A step takes as long as a short one, and more for each token beyond: both as measured lately.

    Long steps count for more than those that are hardly longer than a short one, of which little can be learnt.
    """

    def __init__(self) -> None:
        self.short = 0.0  # seconds of a short step; 0: not known
        self._seconds = self._tokens = 0.0  # sums over longer steps: the seconds beyond a short one, and the tokens

    def learn(self, num_tokens: int, seconds: float, requests: Sequence[Request]) -> None:
        """A step that computed that many tokens of these requests took so long."""
        if num_tokens > SHORT_TOKENS:
            self._seconds = DECAY * self._seconds + max(seconds - self.short, 0.0)
            self._tokens = DECAY * self._tokens + num_tokens
        elif not self.short:
            self.short = seconds
        elif sum(request.num_computed_tokens for request in requests) <= SHORT_CONTEXT:
            self.short += (1 - DECAY) * (seconds - self.short)

    def num_tokens(self, seconds: float) -> int:
        """How many tokens make a step take so long.

        At least 1. Before the first longer step it is `FIRST_TOKENS`, which teaches more; 0 where not even short steps are
        known.
        """
        if not self.short:
            return 0
        if not self._tokens:
            return FIRST_TOKENS
        each = self._seconds / self._tokens
        return max(int((seconds - self.short) / each), 1) if each else 0
