"""Which requests have run out of time."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from time import monotonic

from engine.core.request import Request


class Deadlines:
    """The deadlines of unfinished requests, the next one first. Costs nothing while no request has one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = self._most = 0

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
        while self._heap and self._heap[0][0] <= monotonic():
            _, _, request = heappop(self._heap)
            if request.finish_reason is None:
                yield request
