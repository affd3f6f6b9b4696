"""Fair scheduling of tasks in the event loop: many tasks of one owner do not delay other owners and connections."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol


class Turn(Protocol):
    """A waiting task, for example a future."""

    def done(self) -> bool: ...  # whether it no longer waits
    def set_result(self, result: None, /) -> None: ...  # lets it continue
    def get_loop(self) -> asyncio.AbstractEventLoop: ...


LONG_SECONDS = 1e-3  # a longer iteration of the event loop reduces the number of tasks in the next one


class Turns:
    """Lets a few waiting tasks continue in each iteration of the event loop: one of each owner, then a second of each.

    Everything else that is ready, such as readable connections, runs in between. After a long iteration, fewer tasks
    continue in the next one.
    """

    def __init__(self, at_once: int, clock: Callable[[], float] = perf_counter) -> None:
        """`at_once`: most tasks that continue in one iteration."""
        self._most, self._clock = at_once, clock
        self._at_once = self._num_left = at_once  # limit and rest in this iteration
        self._begin = 0.0  # approximate start of this iteration, by the clock
        self._waiting: OrderedDict[str, deque[Turn]] = OrderedDict()
        self._is_called = False  # whether `_next` is scheduled

    async def wait(self, owner: str) -> None:
        """Wait until a task of this owner may continue."""
        loop = asyncio.get_running_loop()
        if self._num_left and not self._waiting:
            self._num_left -= 1
            self._call(loop)
            return
        turn = loop.create_future()
        self.give(owner, turn)
        await turn

    def give(self, owner: str, turn: Turn) -> None:
        """Set the result of `turn` when it may continue."""
        if self._num_left and not self._waiting:
            self._num_left -= 1
            turn.set_result(None)
        else:
            self._waiting.setdefault(owner, deque()).append(turn)
        self._call(turn.get_loop())

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_called:
            self._is_called, self._begin = True, self._clock()
            loop.call_soon(self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        is_long = self._clock() - self._begin > LONG_SECONDS
        self._at_once = max(self._at_once // 2, 1) if is_long else min(self._at_once + 1, self._most)
        self._is_called, self._num_left = False, self._at_once
        while self._waiting and self._num_left:
            owner, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():  # otherwise its task was cancelled
                turn.set_result(None)
                self._num_left -= 1
        if self._num_left < self._at_once:
            self._call(loop)
