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
# Fewer than for texts, and none to spare: a decoded photograph takes some hundred megabytes.
NUM_IMAGE_THREADS = min(4, max(2, (os.cpu_count() or 1) // 2))
NUM_DOWNLOADS = 8  # at a time; they wait, and compute little


class Workers:
    """A few threads. Queued work is dropped when the task that waits for it is cancelled."""

    def __init__(self, num_processes: int = 1) -> None:
        """`num_processes`: that serve the same model, and divide the threads for images."""
        num_image_threads = max(1, NUM_IMAGE_THREADS // num_processes)
        self._threads = FairExecutor(ThreadPoolExecutor(NUM_THREADS + NUM_SPARE, "worker"), NUM_THREADS, NUM_SPARE)
        self._images, self._downloads = (
            FairExecutor(ThreadPoolExecutor(count, name), count)
            for name, count in (("images", num_image_threads), ("download", NUM_DOWNLOADS))
        )
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[..., _T], *args: object, tenant: str) -> _T:
        """Run a function in a thread. `tenant`: of the request; tenants get threads alternately, and none waits while
        another's work runs, unless `NUM_SPARE` others do.
        """
        return await self._run(self._threads, function, args, tenant)

    async def run_image(self, function: Callable[..., _T], *args: object, tenant: str) -> _T:
        """Run a function that decodes an image."""
        return await self._run(self._images, function, args, tenant)

    async def run_download(self, function: Callable[..., _T], *args: object, tenant: str) -> _T:
        """Run a function that waits for another server."""
        return await self._run(self._downloads, function, args, tenant)

    async def _run(
        self, threads: FairExecutor, function: Callable[..., _T], args: tuple[object, ...], tenant: str
    ) -> _T:
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._return_memory)
        return await asyncio.wrap_future(threads.submit(tenant, function, *args))

    def close(self) -> None:
        if self._trim is not None:
            self._trim.cancel()
        for threads in (self._threads, self._images, self._downloads):
            threads.shutdown()

    def _return_memory(self) -> None:
        self._trim = None
        self._threads.submit("", return_memory)
