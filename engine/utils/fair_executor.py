"""An executor that is fair between tenants: many tasks of one tenant do not delay the few of another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, ParamSpec, TypeVar

from engine.utils.round_robin import RoundRobin

P = ParamSpec("P")
T = TypeVar("T")


class FairExecutor:
    """Wraps an executor. Runs waiting tasks round-robin between tenants."""

    def __init__(self, threads: Executor) -> None:
        """`threads`: used by this object only, and shut down with it."""
        self._threads = threads
        self._lock = Lock()
        self._waiting = RoundRobin[tuple[Future[Any], Callable[[], Any]]]()

    def submit(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a task, as with `Executor`. Tasks cancelled while they wait are not run."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.add(tenant, (future, lambda: function(*args, **kwargs)))
        self._threads.submit(self._run_next)
        return future

    def shutdown(self) -> None:
        """Cancel waiting tasks and shut the executor down, without waiting for running tasks."""
        with self._lock:
            for future, _ in self._waiting:
                future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            future, call = self._waiting.pop()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        finally:
            # The error's traceback holds this frame, which would keep them alive until garbage collection.
            del future, call
