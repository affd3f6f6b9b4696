"""Finds requests that would miss their deadlines."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.request import Request

MIN_MEASURED = 64  # prompts with fewer computed tokens do not count in the estimate of prefill speed


class Deadlines:
    """Estimates the time to first token, so that no request starts that would miss its deadline.

    `DeadlineTimers` in the API process ends requests whose deadlines have passed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds, as deadlines are."""
        self._clock = clock
        self._prompt_token_seconds = 0.0  # moving average of the time per computed prompt token; 0: unknown

    def record_first_token(self, request: Request) -> None:
        """Update the estimate with a request that has its first token."""
        num_computed = request.num_prompt_tokens - request.num_cached_tokens
        if num_computed >= MIN_MEASURED:
            seconds = (self._clock() - request.scheduled_time) / num_computed
            known = self._prompt_token_seconds or seconds
            self._prompt_token_seconds = known + (seconds - known) / 8

    def is_too_late(self, request: Request, num_cached: Callable[[Request], int]) -> bool:
        """Return whether the request's first token would miss its deadline if the request started now, at the estimated
        speed.

        `num_cached`: returns the number of its tokens in the prefix cache. Each refusal halves the estimated time per
        token, so that a wrong estimate does not refuse requests for ever.
        """
        deadline, seconds = request.engine_request.deadline, self._prompt_token_seconds
        if not deadline or request.num_preemptions:
            return False
        most = (deadline - self._clock()) / seconds if seconds else request.num_tokens
        if request.num_tokens <= most or request.num_tokens - num_cached(request) <= most:
            return False
        self._prompt_token_seconds /= 2
        return True
