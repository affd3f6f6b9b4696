"""The queues of the scheduler: the requests that run, the requests that wait, and the order among them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.core.request import Request


class RequestQueues:
    """`running` holds the requests that have a device row and blocks, `waiting` all others.

    Both are in queue order: by priority, then the oldest first. Of one priority, every running request is older than
    every waiting one.
    """

    def __init__(self) -> None:
        self.running: list[Request] = []
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self._by_id: dict[str, Request] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        """All requests, in the order of their arrival."""
        return iter(self._by_id.values())

    def find(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    def add(self, request: Request) -> None:
        """A new request waits."""
        self._num_arrivals += 1
        request.order = (request.engine_request.priority, self._num_arrivals)
        last = next(reversed(self.waiting.values()), request)
        self._by_id[request.request_id] = self.waiting[request.request_id] = request
        if request.order < last.order:
            self._sort_waiting()

    def first_waiting(self) -> Request:
        return next(iter(self.waiting.values()))

    def start(self, request: Request) -> None:
        """A waiting request runs."""
        del self.waiting[request.request_id]
        last = self.running[-1] if self.running else request
        self.running.append(request)
        if request.order < last.order:
            self.running.sort(key=lambda each: each.order)

    def stop_last(self) -> Request:
        """The last running request waits again, before all that are younger or of lower priority."""
        request = self.running.pop()
        first = next(iter(self.waiting.values()), request)
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        if first.order < request.order:
            self._sort_waiting()
        return request

    def remove(self, request: Request) -> None:
        """A request has ended."""
        del self._by_id[request.request_id]
        if self.waiting.pop(request.request_id, None) is None:
            self.running.remove(request)

    def _sort_waiting(self) -> None:
        self.waiting = OrderedDict(sorted(self.waiting.items(), key=lambda item: item[1].order))

    def check(self) -> None:
        """Assert every invariant."""
        everyone = [*self.running, *self.waiting.values()]
        assert {request.request_id: request for request in everyone} == self._by_id
        assert len(everyone) == len(self._by_id), "a request is both running and waiting"
        for queue in (self.running, self.waiting.values()):
            assert [r.order for r in queue] == sorted(r.order for r in queue), "a queue is out of order"
        for priority in {r.engine_request.priority for r in everyone}:
            orders = [r.order for r in everyone if r.engine_request.priority == priority]
            assert orders == sorted(orders), "a request overtook an older one"
