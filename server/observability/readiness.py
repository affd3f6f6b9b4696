"""Readiness of the server, for load balancers and for people who wait for a start."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from engine import EngineState

UNKNOWN_SECONDS = 5  # Retry-After if the duration of the start is unknown
MAX_SECONDS = 60
EVENT_SECONDS = (0.2, 5.0)  # minimum and maximum time between two events of a stream


class HasState(Protocol):
    """The part of the engine that is used here."""

    @property
    def state(self) -> EngineState: ...
    async def state_change(self, seen: EngineState) -> EngineState: ...


class Readiness:
    """The state of the engine, or `draining` while the server stops."""

    def __init__(self, engine: HasState) -> None:
        self._engine = engine
        self.is_draining = False  # running requests may finish, new ones are refused

    @property
    def is_ready(self) -> bool:
        """Return whether a new request would be processed at once."""
        return self._engine.state.is_ready and not self.is_draining

    @property
    def is_asleep(self) -> bool:
        """Return whether the model sleeps, as it was told: a supervisor must not restart the server for that."""
        return self._engine.state.phase == "asleep" and not self.is_draining

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a 503."""
        seconds = self._engine.state.seconds_left_at(time.monotonic())
        return {
            "Retry-After": str(UNKNOWN_SECONDS if seconds is None else min(max(math.ceil(seconds), 1), MAX_SECONDS))
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of /readyz: the phase, the completed fraction (0 to 1), the seconds left, and why the engine
        process was last lost.
        """
        state = self._engine.state
        if self.is_draining:
            state = EngineState("draining", num_restarts=state.num_restarts, reason=state.reason)
        seconds = state.seconds_left_at(time.monotonic())
        return {
            "phase": state.phase,
            "fraction": state.fraction,
            "seconds_left": None if seconds is None else round(seconds, 1),
            "num_restarts": state.num_restarts,
            # Probes need no key, so details after a colon are only logged.
            "last_loss": state.reason.partition(": ")[0] or None,
        }

    def sentence(self) -> str:
        """Return the same as a sentence."""
        state = self.as_dict()
        done = "" if state["fraction"] is None else f", {state['fraction']:.0%}"
        left = "" if state["seconds_left"] is None else f", about {state['seconds_left']:.0f} s left"
        return f"the server does not take requests now: {state['phase']}{done}{left}"

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the state now and after each change, until it is ready, dead or draining."""
        at_least, at_most = EVENT_SECONDS
        while True:
            seen = self._engine.state
            yield self.as_dict()
            if seen.phase in ("ready", "dead") or self.is_draining:
                return
            await asyncio.sleep(at_least)
            try:
                async with asyncio.timeout(at_most):
                    await self._engine.state_change(seen)
            except TimeoutError:
                pass  # send the state again, so that proxies keep the stream open
