"""Estimates the duration of steps from the steps that ran."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.request import Request

# A short step computes at most so many tokens, and reads the KV of at most so many.
# It takes hardly longer than a step of a single token.
SHORT_TOKENS = 16
FIRST_TOKENS = 4 * SHORT_TOKENS
SHORT_CONTEXT = 1024
DECAY = 7 / 8  # weight of older measurements, for each later step


class StepPace:
    """Models the duration of a step as that of a short step plus a time per token, both from recent measurements.

    Each longer step counts in proportion to its tokens, because steps hardly longer than a short one teach little.
    """

    def __init__(self) -> None:
        self.short = 0.0  # seconds of a short step; 0: not known
        self._seconds = self._tokens = 0.0  # decayed sums over longer steps: seconds beyond a short step, tokens

    def learn(self, num_tokens: int, seconds: float, requests: Sequence[Request]) -> None:
        """Record that a step of `num_tokens` tokens of these requests took `seconds`."""
        if num_tokens > SHORT_TOKENS:
            self._seconds = DECAY * self._seconds + max(seconds - self.short, 0.0)
            self._tokens = DECAY * self._tokens + num_tokens
        elif not self.short:
            self.short = seconds
        elif sum(request.num_computed_tokens for request in requests) <= SHORT_CONTEXT:
            self.short += (1 - DECAY) * (seconds - self.short)

    def num_tokens(self, seconds: float) -> int:
        """Return how many tokens a step computes in `seconds`: at least 1, or 0 if that is unknown.

        Returns `FIRST_TOKENS` until a longer step has run, so that there is one to learn from.
        """
        if not self.short:
            return 0
        if not self._tokens:
            return FIRST_TOKENS
        each = self._seconds / self._tokens
        return max(int((seconds - self.short) / each), 1) if each else 0
