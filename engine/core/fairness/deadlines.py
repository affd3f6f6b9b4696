"""Finds requests whose deadline has passed, and requests that would miss theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from engine.core.request import Request

MIN_MEASURED = 64  # prompts with fewer computed tokens do not count in the estimate of prefill speed


class Deadlines:
    """A heap of the deadlines of unfinished requests, and an estimate of the time to first token.

    Costs next to nothing while no request has a deadline.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds, as deadlines are."""
        self._clock = clock
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = self._most = 0
        self._prompt_token_seconds = 0.0  # moving average of the time per computed prompt token; 0: unknown

    def add(self, request: Request) -> None:
        """Add an unfinished request. Does nothing if it has no deadline."""
        if not request.engine_request.deadline:
            return
        if len(self._heap) > self._most:  # drop finished requests, which would otherwise stay until their deadlines
            self._heap = [entry for entry in self._heap if entry[2].finish_reason is None]
            heapify(self._heap)
            self._most = 2 * len(self._heap) + 16
        self._num_added += 1
        heappush(self._heap, (request.engine_request.deadline, self._num_added, request))

    def passed(self) -> Iterator[Request]:
        """Remove and yield the unfinished requests whose deadlines have passed."""
        while self._heap and self._heap[0][0] <= self._clock():
            _, _, request = heappop(self._heap)
            if request.finish_reason is None:
                yield request

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
