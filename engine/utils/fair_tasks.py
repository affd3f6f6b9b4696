"""Fair scheduling of tasks in the event loop: many tasks of one tenant do not delay other tenants and connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from engine.utils.round_robin import RoundRobin

LONG_SECONDS = 1e-3  # a longer iteration of the event loop reduces the number of tasks in the next one


class Waiter(Protocol):
    """A waiting task, for example a future."""

    def done(self) -> bool: ...  # whether it no longer waits
    def set_result(self, result: None, /) -> None: ...  # lets it continue
    def get_loop(self) -> asyncio.AbstractEventLoop: ...


class FairTasks:
    """Lets a few waiting tasks continue in each iteration of the event loop, round-robin between tenants.

    Everything else that is ready, such as readable connections, runs in between. After a long iteration, fewer tasks
    continue in the next one.
    """

    def __init__(self, at_once: int, clock: Callable[[], float] = perf_counter) -> None:
        """`at_once`: most tasks that continue in one iteration."""
        self._most, self._clock = at_once, clock
        self._at_once = self._num_left = at_once  # limit and rest in this iteration
        self._begin = 0.0  # approximate start of this iteration, by the clock
        self._waiting = RoundRobin[Waiter]()
        self._is_called = False  # whether `_next` is scheduled

    async def wait(self, tenant: str) -> None:
        """Wait until a task of this tenant may continue."""
        loop = asyncio.get_running_loop()
        if self._num_left and not self._waiting:
            self._num_left -= 1
            self._call(loop)
            return
        waiter = loop.create_future()
        self.add(tenant, waiter)
        await waiter

    def add(self, tenant: str, waiter: Waiter) -> None:
        """Set the result of `waiter` when it may continue."""
        if self._num_left and not self._waiting:
            self._num_left -= 1
            waiter.set_result(None)
        else:
            self._waiting.add(tenant, waiter)
        self._call(waiter.get_loop())

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_called:
            self._is_called, self._begin = True, self._clock()
            loop.call_soon(self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        is_long = self._clock() - self._begin > LONG_SECONDS
        self._at_once = max(self._at_once // 2, 1) if is_long else min(self._at_once + 1, self._most)
        self._is_called, self._num_left = False, self._at_once
        while self._waiting and self._num_left:
            waiter = self._waiting.pop()
            if not waiter.done():  # otherwise its task was cancelled
                waiter.set_result(None)
                self._num_left -= 1
        if self._num_left < self._at_once:
            self._call(loop)
