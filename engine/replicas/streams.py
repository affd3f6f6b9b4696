"""Streams of request updates: the pending output of each request, and the task that waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine.core.batch import EngineOutput
from engine.core.engine_request import EngineRequest
from engine.errors import EngineDeadError
from engine.processing.output_collector import OutputCollector, RequestMetrics, RequestUpdate
from engine.utils.fair_tasks import FairTasks


class Progressing(Protocol):
    """The part of an `OutputCollector` that is used while a request runs."""

    finished: bool
    metrics: RequestMetrics


class RunningStream(Protocol):
    """A request that runs, and who gets its outputs: a `Stream`, or a `GuestStream` of another API process."""

    request: EngineRequest
    num_losses: int  # losses of the engine process since the request arrived

    @property
    def output(self) -> Progressing: ...
    @property
    def has_begun(self) -> bool: ...
    @property
    def is_closed(self) -> bool: ...
    def add(self, output: EngineOutput, now: float, /) -> None: ...
    def add_token(self, token_id: int, now: float, /) -> None: ...
    def add_tokens(self, token_ids: list[int], now: float, /) -> None: ...
    def close(self, how: str, /) -> None: ...


@dataclass(slots=True)
class Pace:
    """Least seconds between two updates of a stream, the same for all streams. Grows with their number."""

    seconds: float = 0.0


class Stream:
    """An `OutputCollector` that one task can wait for."""

    def __init__(
        self, request: EngineRequest, output: OutputCollector, interval: int, pace: Pace, fair: FairTasks
    ) -> None:
        """`interval`: tokens per update, except for the first and the last update."""
        self.request, self.output = request, output
        self.num_losses = 0  # losses of the engine process since the request arrived
        self.ready = False  # there is output to take
        self._interval, self._pace, self._fair, self._num_held = interval, pace, fair, 0
        self._latest = 0.0  # when tokens last made the stream ready
        self._death: str | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Return whether some output has arrived."""
        return self.output.metrics.first_token_ts > 0 or self.output.finished

    @property
    def is_closed(self) -> bool:
        return self._death is not None

    def add(self, output: EngineOutput, now: float) -> None:
        if self.output.finished:
            return
        can_wait = self.has_begun and output.finish_reason is None
        self.output.add(output, now)
        if can_wait:
            self._hold(len(output.new_token_ids), now)
        else:
            self.ready = True
            self._wake()

    def add_token(self, token_id: int, now: float) -> None:
        if not self.output.finished:
            self.output.add_token(token_id, now)
            self._hold(1, now)

    def add_tokens(self, token_ids: list[int], now: float) -> None:
        if not self.output.finished:
            self.output.add_tokens(token_ids, now)
            self._hold(len(token_ids), now)

    def _hold(self, num_tokens: int, now: float) -> None:
        """Count new tokens. Wakes the reader if there are `interval` tokens and the last update is long enough ago."""
        self._num_held += num_tokens
        if self._num_held >= self._interval and now - self._latest >= self._pace.seconds:
            self._latest = now
            self.ready = True
            self._wake()

    def take(self) -> RequestUpdate:
        self.ready, self._num_held = False, 0
        return self.output.take()

    def close(self, how: str) -> None:
        """Close the stream: no more output will arrive. `how`: how the engine died."""
        self._death = how
        self.ready = self.output.has_output
        self._wake()

    def changed(self) -> asyncio.Future[None]:
        """Return a future that is done when output may be ready. Raises `EngineDeadError` on a closed stream."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            self._fair.add(self.request.tenant, waiter)


class Updates(AsyncGenerator[RequestUpdate, None]):
    """An iterator over the updates of a running request, for a single reader."""

    def __init__(self, stream: Stream, forget: Callable[[], None]) -> None:
        """`forget`: called once in the event loop when the reader is gone."""
        self._stream, self._forget = stream, forget
        self._loop = asyncio.get_running_loop()
        self._ended = False

    async def __anext__(self) -> RequestUpdate:
        if self._ended:
            raise StopAsyncIteration
        stream = self._stream
        try:
            while not stream.ready:
                await stream.changed()
            update = stream.take()
        except BaseException:
            self._end()
            raise
        if update.finish_reason is not None:
            self._end()
        return update

    async def asend(self, value: None) -> RequestUpdate:
        return await self.__anext__()

    async def athrow(self, *error: Any) -> RequestUpdate:
        self._end()
        return await super().athrow(*error)

    async def aclose(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._forget()

    def __del__(self) -> None:  # runs in any thread
        if not self._ended:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the engine with it
                self._loop.call_soon_threadsafe(self._forget)
