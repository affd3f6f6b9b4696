"""Threads for compiling grammars."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from engine.utils.fair_executor import FairExecutor
from engine.utils.memory import return_memory

P = ParamSpec("P")
T = TypeVar("T")

IDLE_SECONDS = 5.0
NUM_SPARE = 4  # further threads, each for a group of tenants that has no grammar being compiled
# A low priority, but not the lowest: between library calls these threads hold Python's global lock, and a thread that
# gets no core meanwhile would block its whole process for up to a second.
NICENESS = 5
STACK_BYTES = 64 << 20  # the library recurses as deeply as a grammar is nested


class CompileThreads:
    """Low-priority threads, started with the first grammar, that serve tenants alternately.

    A tenant's first grammar does not wait for another's long one, unless `NUM_SPARE` others' do.

    `release` ends idle threads, since deep grammars leave them with large stacks.
    """

    def __init__(self, num_threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_threads, self._clock = num_threads, clock
        self._executor: ThreadPoolExecutor | None = None
        self._fair: FairExecutor | None = None
        self._lock = threading.Lock()
        self._num_working = 0  # running tasks
        self._used = 0.0  # when the last task finished

    def submit(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a task, like `FairExecutor.submit`."""
        if self._fair is None:
            self._executor = make_executor(self._num_threads + NUM_SPARE)
            self._fair = FairExecutor(self._executor, self._num_threads, NUM_SPARE)
        with self._lock:
            self._num_working += 1
        work = self._fair.submit(tenant, function, *args, **kwargs)
        work.add_done_callback(self._ended)
        return work

    def _ended(self, work: Future[T]) -> None:
        with self._lock:
            self._num_working -= 1
            self._used = self._clock()

    def release(self) -> bool:
        """End the threads if they have been idle for some seconds, and return their memory. Returns whether there
        are threads.
        """
        with self._lock:
            is_idle = not self._num_working and self._clock() - self._used >= IDLE_SECONDS
        if self._executor is not None and is_idle:
            self._executor.submit(return_memory)
            self._executor.shutdown(wait=False)
            self._executor = self._fair = None
        return self._executor is not None

    def shutdown(self) -> None:
        """End the threads. Queued tasks are cancelled."""
        if self._fair is not None:
            self._fair.shutdown()


class ReleasedThreads:
    """Compile threads of an event loop, which releases them when they are idle."""

    def __init__(self, threads: CompileThreads) -> None:
        self._threads = threads
        self._next_check: asyncio.TimerHandle | None = None  # whether the threads are idle; None: there are none

    async def run(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a task as `submit` does, and return its result."""
        if self._next_check is None:
            self._next_check = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._check)
        return await asyncio.wrap_future(self._threads.submit(tenant, function, *args, **kwargs))

    def _check(self) -> None:
        again = self._threads.release()
        self._next_check = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._check) if again else None

    def shutdown(self) -> None:
        """End the threads. Queued tasks are cancelled."""
        if self._next_check is not None:
            self._next_check.cancel()
        self._threads.shutdown()


class _DeepThreads(ThreadPoolExecutor):
    """Threads with stacks large enough for any grammar. Each starts when all others are busy."""

    _starting = threading.Lock()  # the size of stacks is the whole process's

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with self._starting:
            before = threading.stack_size(STACK_BYTES)
            try:
                return super().submit(function, *args, **kwargs)
            finally:
                threading.stack_size(before)


def make_executor(num_threads: int) -> ThreadPoolExecutor:
    """Create threads of low priority that can compile any grammar."""
    return _DeepThreads(num_threads, "grammar", initializer=_give_way)


def _give_way() -> None:
    """Lower this thread's priority: its tasks are long and run mostly without Python's global lock."""
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(own + NICENESS, 19))
