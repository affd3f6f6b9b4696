"""An executor that is fair between owners: many tasks of one owner do not delay the few of another."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class FairExecutor:
    """Wraps an executor. Runs the first task of each owner, then the second task of each, and so on."""

    def __init__(self, threads: Executor) -> None:
        """`threads`: used by this object only, and shut down with it."""
        self._threads = threads
        self._lock = Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, owner: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a task, as with `Executor`. Tasks cancelled while they wait are not run."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((future, lambda: function(*args, **kwargs)))
        self._threads.submit(self._run_next)
        return future

    def shutdown(self) -> None:
        """Cancel waiting tasks and shut the executor down, without waiting for running tasks."""
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
            # The error's traceback holds this frame, which would keep them alive until garbage collection.
            del future, call
