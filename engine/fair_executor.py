"""Threads that serve owners in turn: one's many tasks do not hold up another's few."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class FairExecutor:
    """In front of an executor: it takes one task of each owner, then each one's second, and so on."""

    def __init__(self, threads: Executor) -> None:
        """`threads` is shut down with this, and gets work from nowhere else."""
        self._threads = threads
        self._lock = Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, owner: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As of `Executor`. Tasks that are cancelled while they wait are not run."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((future, lambda: function(*args, **kwargs)))
        self._threads.submit(self._run_next)
        return future

    def shutdown(self) -> None:
        """Tasks that wait are cancelled."""
        with self._lock:
            for waiting in self._waiting.values():
                for future, _ in waiting:
                    future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            owner, waiting = self._waiting.popitem(last=False)
            future, call = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        finally:
            # The error's traceback holds this frame: else all that was asked for would wait for the collector.
            del future, call
