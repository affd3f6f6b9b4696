"""The streams of all requests with a reader, and what ends them early."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Protocol

from engine.core.batch import EngineOutput
from engine.core.engine_request import EngineRequest
from engine.processing.output_collector import OutputCollector, RequestUpdate
from engine.replicas.deadline_timers import DeadlineTimers
from engine.replicas.in_flight import InFlight
from engine.replicas.streams import Pace, RunningStream, Stream, Updates
from engine.utils.fair_tasks import FairTasks

UPDATES_AT_ONCE = 16  # most updates made and sent in one iteration of the event loop
# Of all streams together: about half of what one core can send. With many streams, each gets fewer and longer updates.
UPDATES_PER_SECOND = 20_000


class Assigner(Protocol):
    """Who runs the requests: a `Dispatcher`, or the engine of another process."""

    def assign(self, stream: RunningStream, /) -> None: ...
    def remove(self, stream: RunningStream, /) -> None: ...  # it has no reader any more
    def ended(self, stream: RunningStream, /) -> None: ...  # it has its last token


class StreamTable:
    """Opens a stream for each request, and closes it when the request ends or its reader is gone."""

    def __init__(self, dispatcher: Assigner, interval: int) -> None:
        """`interval`: tokens per update. Requires a running event loop."""
        self.in_flight = InFlight()
        self._dispatcher, self._interval = dispatcher, interval
        self._streams: dict[str, RunningStream] = {}
        self._num_read = 0  # of them read in this process
        self._deadlines = DeadlineTimers(lambda request_id: self.end_early(request_id, "timeout"))
        self._pace, self._fair = Pace(), FairTasks(UPDATES_AT_ONCE)

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request: EngineRequest, output: OutputCollector) -> AsyncGenerator[RequestUpdate, None]:
        """Send a request to a replica, and return its updates. Raises `ValueError` if its id is in use."""
        stream = Stream(request, output, self._interval, self._pace, self._fair)
        self.begin(stream)
        self._count(1)
        self._deadlines.add(request)
        return Updates(stream, lambda: self.forget(stream))

    def begin(self, stream: RunningStream) -> None:
        """Send a stream's request to a replica. Raises `ValueError` if its id is in use."""
        request_id = stream.request.request_id
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        self._streams[request_id] = stream
        self.in_flight.add(request_id, stream.request.tenant)
        self._dispatcher.assign(stream)

    def forget(self, stream: RunningStream) -> None:
        """The stream has lost its reader: abort the request if it is unfinished."""
        request_id = stream.request.request_id
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._deadlines.remove(request_id)
            if isinstance(stream, Stream):
                self._count(-1)
            self._end(stream)

    def _count(self, change: int) -> None:
        self._num_read += change
        self._pace.seconds = self._num_read / UPDATES_PER_SECOND

    def _end(self, stream: RunningStream) -> None:
        self.in_flight.end(stream.request.request_id)
        self._dispatcher.remove(stream)

    def end_early(self, request_id: str, finish_reason: str) -> None:
        """End a request with the output so far. Unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.output.finished:
            self._end(stream)
            stream.add(EngineOutput(request_id, [], finish_reason), time.monotonic())

    def end_all(self, finish_reason: str) -> None:
        """End every request, as `end_early` does."""
        for request_id in list(self._streams):
            self.end_early(request_id, finish_reason)

    def ended(self, stream: RunningStream) -> None:
        """A replica has ended the request."""
        self.in_flight.end(stream.request.request_id)
        self._dispatcher.ended(stream)

    def close(self, reason: str) -> None:
        """Fail all requests: no more output will arrive."""
        for stream in list(self._streams.values()):
            stream.close(reason)
