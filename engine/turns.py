"""Turns in the event loop: what a crowd of one owner's tasks does is not done all at once, before what others wait for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol


class Turn(Protocol):
    """What waits. A future does."""

    def done(self) -> bool: ...  # it waits no more
    def set_result(self, result: None, /) -> None: ...  # it may go on
    def get_loop(self) -> asyncio.AbstractEventLoop: ...


LONG_SECONDS = 1e-3  # for an iteration of the event loop: others wait for several of them


class Turns:
    """Lets a few tasks go on in each iteration of the event loop: one of each owner that waits, then each one's second.

    All else that is ready, such as connections to be read, comes in between. Fewer go on after an iteration that was long.
    """

    def __init__(self, at_once: int, clock: Callable[[], float] = perf_counter) -> None:
        """`at_once`: tasks that go on in one iteration, at most."""
        self._most, self._clock = at_once, clock
        self._at_once = self._num_left = at_once  # in this iteration
        self._begin = 0.0  # of this iteration, about, by the clock
        self._waiting: OrderedDict[str, deque[Turn]] = OrderedDict()
        self._is_called = False  # `_next`, by the next iteration

    async def wait(self, owner: str) -> None:
        """Until a task of this owner may go on."""
        loop = asyncio.get_running_loop()
        if self._num_left and not self._waiting:
            self._num_left -= 1
            self._call(loop)
            return
        turn = loop.create_future()
        self.give(owner, turn)
        await turn

    def give(self, owner: str, turn: Turn) -> None:
        """Set the result of `turn` when it may go on."""
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
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._num_left -= 1
        if self._num_left < self._at_once:
            self._call(loop)
