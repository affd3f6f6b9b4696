"""The number of tokens of the next step: as many as a new request can wait for."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from engine.core.fairness.arrivals import Arrivals
from engine.core.fairness.step_time import StepTimes
from engine.core.request import Request

# While several tenants have requests, a new request waits for the steps in flight at most about as long as this many
# short steps take, or this many seconds, whichever is longer.
SHARED_STEPS = 16
SHARED_SECONDS = 0.03
# The same while an idle tenant is expected to send a request.
EXPECTED_STEPS = SHARED_STEPS // 2
EXPECTED_SECONDS = SHARED_SECONDS / 2


class StepBudget:
    """Limits the length of steps by the times of earlier ones and the expected arrivals of requests."""

    def __init__(self, max_num_tokens: int, arrivals: Arrivals) -> None:
        """`max_num_tokens`: of any step. `arrivals`: predicts the next request."""
        self.max_num_tokens = max_num_tokens
        self._step_times, self._arrivals = StepTimes(), arrivals
        self._last_read = 0.0  # when the previous step was read

    def record(self, num_tokens: int, launched_time: float, now: float, requests: Sequence[Request]) -> None:
        """Record a step of these requests that was read `now`. Times are in monotonic seconds."""
        self._step_times.record(num_tokens, now - max(launched_time, self._last_read), requests)
        self._last_read = now

    def num_tokens(self, now: float, num_in_flight: int, is_shared: bool) -> int:
        """Return the maximum number of tokens of the next step.

        `num_in_flight`: steps that are not read yet. `is_shared`: several tenants have requests.
        """
        most, short = self.max_num_tokens, self._step_times.short
        num_waited = 1 + num_in_flight  # steps that a new request waits for
        seconds = self._arrivals.seconds_to_next(now) + max(EXPECTED_STEPS * short, EXPECTED_SECONDS)
        if is_shared:
            seconds = min(seconds, max(SHARED_STEPS * short, SHARED_SECONDS))
        if seconds == inf:
            return most
        return min(self._step_times.num_tokens(seconds / num_waited) or most, most)
