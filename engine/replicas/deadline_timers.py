"""The owner of all deadlines: ends each unfinished request at its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from engine.core.engine_request import EngineRequest


class DeadlineTimers:
    """A timer for each unfinished request that has a deadline. Bound to an event loop.

    It runs in the API process, so it holds wherever the request is: waiting for an engine process or its grammar, held
    during the recovery from a failed step, or in a process that is stopped or computes a long step.
    """

    def __init__(self, passed: Callable[[str], None]) -> None:
        """`passed`: called with the id of each request whose deadline has passed."""
        self._passed = passed
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, request: EngineRequest) -> None:
        """Start the timer of a request; do nothing if it has no deadline."""
        if request.deadline:
            seconds = max(request.deadline - monotonic(), 0.0)
            self._timers[request.request_id] = self._loop.call_later(seconds, self._passed, request.request_id)

    def remove(self, request_id: str) -> None:
        """Stop the timer of a request. Unknown ids are ignored."""
        if (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()
