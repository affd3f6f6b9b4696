"""LoRA adapters that several ranks read, each its part: rank 0 knows when all have, and whether one could not."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.core.engine_request import Adapter
from engine.models.errors import ModelError


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """A message to a follower: begin to read an adapter, and report the end with this number."""

    adapter: Adapter
    number: int


@dataclass(slots=True)
class _Read:
    ready: Future[None]
    num_waiting: int  # ranks that have not finished
    error: BaseException | None = None


class AdapterReads:
    """The reads in progress. Thread-safe."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._numbers = num_ranks, itertools.count()
        self._reads: dict[int, _Read] = {}
        self._lock = threading.Lock()

    def begin(self) -> tuple[int, Future[None]]:
        """Return the number of a new read, and its result: the first error of a rank, once all have finished."""
        number, ready = next(self._numbers), Future[None]()
        with self._lock:
            self._reads[number] = _Read(ready, self._num_ranks)
        return number, ready

    def finish(self, number: int, error: BaseException | None) -> None:
        """Record that a rank has finished, with its error."""
        with self._lock:
            read = self._reads[number]
            read.num_waiting -= 1
            read.error = read.error or error
            if read.num_waiting:
                return
            del self._reads[number]
        if read.error is None:
            read.ready.set_result(None)
        else:
            read.ready.set_exception(read.error)

    def finish_own(self, number: int, own: Future[Any]) -> None:
        """Record the end of this rank's own read."""
        own.add_done_callback(lambda ready: self.finish(number, _error_of(ready)))

    def receive(self, report: dict[str, Any]) -> None:
        """Record a follower's report, see `report_read`."""
        error = None
        if report["error"] is not None:
            kind = ModelError if report["is_of_model"] else RuntimeError
            error = kind(report["error"])
        self.finish(report["read"], error)


def report_read(number: int, rank: int, send: Callable[[dict[str, Any]], None], ready: Future[Any]) -> None:
    """Report the end of a follower's read to rank 0, from the thread that read."""
    ready.add_done_callback(partial(_report, number, rank, send))


def _report(number: int, rank: int, send: Callable[[dict[str, Any]], None], ready: Future[Any]) -> None:
    error = _error_of(ready)
    text = None if error is None else f"rank {rank}: {str(error) or type(error).__name__}"
    send({"read": number, "error": text, "is_of_model": isinstance(error, ModelError)})


def _error_of(ready: Future[Any]) -> BaseException | None:
    return RuntimeError("the read was cancelled") if ready.cancelled() else ready.exception()
