"""The number of tokens of the next step: as many as a new request can wait for."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from engine.core.fairness.arrivals import Visits
from engine.core.fairness.step_time import StepPace
from engine.core.request import Request

# While several owners have requests, a new request waits for the steps in flight at most about as long as this many
# short steps take, or this many seconds, whichever is longer.
SHARED_STEPS = 16
SHARED_SECONDS = 0.03
# The same while an idle owner is expected to send a request.
EXPECTED_STEPS = SHARED_STEPS // 2
EXPECTED_SECONDS = SHARED_SECONDS / 2


class StepBudget:
    """Limits the length of steps by the times of earlier ones and the expected arrivals of requests."""

    def __init__(self, max_num_tokens: int, visits: Visits) -> None:
        """`max_num_tokens`: of any step. `visits`: predicts the next request."""
        self.max_num_tokens = max_num_tokens
        self._pace, self._visits = StepPace(), visits
        self._last_read = 0.0  # when the previous step was read

    def record(self, num_tokens: int, launched_time: float, now: float, requests: Sequence[Request]) -> None:
        """Record a step of these requests that was read `now`. Times are in monotonic seconds."""
        self._pace.learn(num_tokens, now - max(launched_time, self._last_read), requests)
        self._last_read = now

    def num_tokens(self, now: float, num_in_flight: int, is_shared: bool) -> int:
        """Return the maximum number of tokens of the next step.

        `num_in_flight`: steps that are not read yet. `is_shared`: several owners have requests.
        """
        most, short = self.max_num_tokens, self._pace.short
        num_waited = 1 + num_in_flight  # steps that a new request waits for
        seconds = self._visits.seconds_to_next(now) + max(EXPECTED_STEPS * short, EXPECTED_SECONDS)
        if is_shared:
            seconds = min(seconds, max(SHARED_STEPS * short, SHARED_SECONDS))
        if seconds == inf:
            return most
        return min(self._pace.num_tokens(seconds / num_waited) or most, most)
