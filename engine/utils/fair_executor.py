"""An executor that is fair between tenants: many or long tasks of one tenant do not delay the few of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, ParamSpec, TypeVar

from engine.core.fairness.tenants import group_of
from engine.utils.round_robin import RoundRobin

P = ParamSpec("P")
T = TypeVar("T")
_Task = tuple[str, Future[Any], Callable[[], Any]]  # group, result, call


class FairExecutor:
    """Wraps an executor. Runs waiting tasks round-robin between tenants.

    All groups of tenants share `num_threads`. While these are busy, a group without a running task gets one of
    `num_spare` further threads, so that it does not wait for another group's long tasks.
    """

    def __init__(self, threads: Executor, num_threads: int, num_spare: int = 0) -> None:
        """`threads`: `num_threads + num_spare` of them, used by this object only, and shut down with it."""
        self._threads = threads
        self._num_threads, self._num_spare = num_threads, num_spare
        self._lock = Lock()
        self._waiting = RoundRobin[_Task]()
        self._running: Counter[str] = Counter()  # group → running tasks, never 0

    def submit(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a task, as with `Executor`. Tasks cancelled while they wait are not run."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.add(tenant, (group_of(tenant), future, lambda: function(*args, **kwargs)))
            task = self._next()
        if task is not None:
            self._threads.submit(self._run, [task])
        return future

    def shutdown(self) -> None:
        """Cancel waiting tasks and shut the executor down, without waiting for running tasks."""
        with self._lock:
            for _, future, _ in self._waiting:
                future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> _Task | None:
        """Take the next task that may run, and count it as running."""
        num_running = self._running.total()
        if num_running >= self._num_threads + self._num_spare:
            return None
        try:
            task = self._waiting.pop(self._running if num_running >= self._num_threads else ())
        except KeyError:
            return None
        self._running[task[0]] += 1
        return task

    def _run(self, tasks: list[_Task]) -> None:
        """Run a task, then others as long as some may run. `tasks`: the first one, which is removed."""
        while tasks:
            group, future, call = tasks.pop()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            # An error's traceback holds this frame, which would keep them alive until garbage collection.
            del future, call
            with self._lock:
                self._running[group] -= 1
                if not self._running[group]:
                    del self._running[group]
                if (task := self._next()) is not None:
                    tasks.append(task)
                del task
