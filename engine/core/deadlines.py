"""Which requests have run out of time, and which would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from engine.core.request import Request

MIN_PACED = 64  # computed prompt tokens from which on a prompt tells how fast prompts are computed


class Deadlines:
    """The deadlines of unfinished requests, the next one first, and how long prompts take until their first tokens.

    Costs next to nothing while no request has a deadline.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds, as deadlines are."""
        self._clock = clock
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = self._most = 0
        self._prompt_token_seconds = 0.0  # for each prompt token that is computed, lately; 0: not known

    def add(self, request: Request) -> None:
        if not request.engine_request.deadline:
            return
        if len(self._heap) > self._most:  # drop those that have ended, so that they are not kept until their deadlines
            self._heap = [entry for entry in self._heap if entry[2].finish_reason is None]
            heapify(self._heap)
            self._most = 2 * len(self._heap) + 16
        self._num_added += 1
        heappush(self._heap, (request.engine_request.deadline, self._num_added, request))

    def passed(self) -> Iterator[Request]:
        """Take out the unfinished requests whose deadlines have passed."""
        while self._heap and self._heap[0][0] <= self._clock():
            _, _, request = heappop(self._heap)
            if request.finish_reason is None:
                yield request

    def learn(self, request: Request) -> None:
        """Its first token has come."""
        num_computed = request.num_prompt_tokens - request.num_cached_tokens
        if num_computed >= MIN_PACED:
            seconds = (self._clock() - request.scheduled_time) / num_computed
            known = self._prompt_token_seconds or seconds
            self._prompt_token_seconds = known + (seconds - known) / 8

    def is_too_late(self, request: Request, num_cached: Callable[[Request], int]) -> bool:
        """Whether its first token would come after its deadline, if it began now, at the pace of lately.

        `num_cached`: counts its tokens in the prefix cache. The pace is a guess, which is trusted less the more often it
        refuses a request.
        """
        deadline, pace = request.engine_request.deadline, self._prompt_token_seconds
        if not deadline or request.num_preemptions:
            return False
        most = (deadline - self._clock()) / pace if pace else request.num_tokens
        if request.num_tokens <= most or request.num_tokens - num_cached(request) <= most:
            return False
        self._prompt_token_seconds /= 2
        return True
