"""Threads for work that would block the event loop: large bodies, long texts, slow templates."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.utils.fair_executor import FairExecutor
from engine.utils.memory import return_memory

_T = TypeVar("_T")
# Fewer than cores: each busy thread takes a core, and may get Python's global lock before the event loop does.
NUM_THREADS = min(4, max(1, (os.cpu_count() or 1) - 1))
# Further threads, each for a caller that has no work running: callers share the cores, but do not wait for each other.
NUM_SPARE = 8
_TRIM_SECONDS = 5.0


class Workers:
    """A few threads. Queued work is dropped when the task that waits for it is cancelled."""

    def __init__(self) -> None:
        self._threads = FairExecutor(ThreadPoolExecutor(NUM_THREADS + NUM_SPARE, "worker"), NUM_THREADS, NUM_SPARE)
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[..., _T], *args: object, tenant: str) -> _T:
        """Run a function in a thread. `tenant`: of the request; tenants get threads alternately, and none waits while
        another's work runs, unless `NUM_SPARE` others do.
        """
        loop = asyncio.get_running_loop()
        if self._trim is None:
            self._trim = loop.call_later(_TRIM_SECONDS, self._return_memory)
        return await asyncio.wrap_future(self._threads.submit(tenant, function, *args))

    def close(self) -> None:
        if self._trim is not None:
            self._trim.cancel()
        self._threads.shutdown()

    def _return_memory(self) -> None:
        self._trim = None
        self._threads.submit("", return_memory)
