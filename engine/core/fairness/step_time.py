"""Estimates how long steps take, from the steps that ran."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.request import Request

# A step is short if it computes at most SHORT_TOKENS tokens and reads the KV of at most SHORT_CONTEXT tokens.
SHORT_TOKENS = 16
SHORT_CONTEXT = 1024
FIRST_TOKENS = 4 * SHORT_TOKENS  # of the first longer step, which shows the time per token
DECAY = 7 / 8  # weight of earlier steps, for each step since


class StepTimes:
    """A linear model of step time: the time of a short step, plus a time per token. Recent steps count most.

    Longer steps have more weight: the time per token hardly shows in a step that is little longer than a short one.
    """

    def __init__(self) -> None:
        self.short = 0.0  # seconds of a short step; 0: unknown
        self._seconds = self._tokens = 0.0  # decayed sums over longer steps: seconds beyond a short step, and tokens

    def record(self, num_tokens: int, seconds: float, requests: Sequence[Request]) -> None:
        """Record that a step with `num_tokens` tokens of these requests took `seconds`."""
        if num_tokens > SHORT_TOKENS:
            self._seconds = DECAY * self._seconds + max(seconds - self.short, 0.0)
            self._tokens = DECAY * self._tokens + num_tokens
        elif not self.short:
            self.short = seconds
        elif sum(request.num_computed_tokens for request in requests) <= SHORT_CONTEXT:
            self.short += (1 - DECAY) * (seconds - self.short)

    def num_tokens(self, seconds: float) -> int:
        """Return how many tokens a step computes in `seconds`: at least 1, or 0 if there is no estimate.

        Returns `FIRST_TOKENS` until a longer step has run, and 0 until a short step has run.
        """
        if not self.short:
            return 0
        if not self._tokens:
            return FIRST_TOKENS
        each = self._seconds / self._tokens
        return max(int((seconds - self.short) / each), 1) if each else 0
