"""The engine's state: starting with its progress, ready, or dead. For health checks, progress pages and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

STARTING = ("starting", "downloading", "loading", "profiling", "compiling", "capturing")  # phases of a start
PHASES = (*STARTING, "ready", "asleep", "restarting", "unresponsive", "dead")


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state at one moment. During a restart the phase is one of `STARTING` and `num_restarts` is not 0."""

    phase: str = "starting"  # one of PHASES
    fraction: float | None = None  # completed part of the phase, from 0 to 1; None: not known
    # Estimate until "ready" if a start with the same settings is on record, else until the phase ends. None: not known.
    seconds_left: float | None = None
    num_restarts: int = 0  # of the engine process, so far
    reason: str = ""  # why the last engine process was lost
    at: float = field(default=0.0, compare=False)  # monotonic seconds: when this state and its estimate began

    def seconds_left_at(self, now: float) -> float | None:
        """Return the estimate for a later time `now`, in monotonic seconds; None if not known or exceeded."""
        if self.seconds_left is None or (left := self.seconds_left - (now - self.at)) <= 0:
            return None
        return left

    @property
    def is_ready(self) -> bool:
        """Return whether the engine is running requests."""
        return self.phase == "ready"


def combined(states: Sequence[EngineState], has_started: bool) -> EngineState:
    """Combine the states of several replicas.

    During the first start this is the state of the slowest replica. From then on it is "ready" while any replica is.
    """
    order = ("ready", "unresponsive", *reversed(STARTING), "asleep", "restarting", "dead")
    shown = min(states, key=lambda state: order.index(state.phase))
    if not has_started:
        shown = max(states, key=lambda state: order.index(state.phase))
    latest = max(states, key=lambda state: (bool(state.reason), state.at))
    return replace(shown, num_restarts=sum(state.num_restarts for state in states), reason=latest.reason)


class StateBoard:
    """Holds the current state and lets tasks wait for a change. Bound to an event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = EngineState()
        self._clock = clock
        self._waiters: set[asyncio.Future[None]] = set()

    def show(self, state: EngineState) -> None:
        """Set the state."""
        if state != self.state:
            self.state = replace(state, at=self._clock())
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()

    async def change(self, seen: EngineState) -> EngineState:
        """Wait until the state differs from `seen`, and return it."""
        while self.state == seen:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        return self.state


class StateHolder(StateBoard):
    """The state of one engine, with time estimates. Only its owner changes it."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        expected_seconds: float | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`expected_seconds`: duration of the first start, without download; None: not known.

        `changed`: called after each change.
        """
        super().__init__(clock)
        self._expected_seconds, self._changed = expected_seconds, changed
        self._start_began = self._phase_began = clock()
        self.start_seconds: float | None = None  # duration of the last start, without download; None: there was none

    @property
    def has_been_ready(self) -> bool:
        return self.start_seconds is not None

    def enter(self, phase: str, *, reason: str | None = None) -> None:
        """Enter another phase. `reason`: why the process was lost."""
        now, num_restarts = self._clock(), self.state.num_restarts
        if self.state.phase == "downloading":
            self._start_began += now - self._phase_began
        if phase == "restarting":
            self._start_began, num_restarts = now, num_restarts + 1
        elif phase == "starting":  # again: the engine wakes up
            self._start_began = now
        elif phase == "ready" and self.state.phase != "unresponsive":
            self.start_seconds = now - self._start_began
        self._phase_began = now
        reason = self.state.reason if reason is None else reason
        self.show(EngineState(phase, None, self._seconds_left(phase, None), num_restarts, reason))

    def advance(self, phase: str, fraction: float | None) -> None:
        """Update the progress of a phase of the start. Enters the phase if it is new."""
        if phase != self.state.phase:
            self.enter(phase)
        if fraction is not None:
            self.show(replace(self.state, fraction=fraction, seconds_left=self._seconds_left(phase, fraction)))

    def _seconds_left(self, phase: str, fraction: float | None) -> float | None:
        if phase not in STARTING and phase != "restarting":
            return None
        now = self._clock()
        if self.start_seconds is not None:
            return max(self.start_seconds - (now - self._start_began), 0.0)
        if phase != "downloading" and self._expected_seconds is not None:
            left = self._expected_seconds - (now - self._start_began)
            if left > 0:  # otherwise this start takes longer
                return left
        if not fraction:
            return None
        return (now - self._phase_began) * (1 - fraction) / fraction

    def show(self, state: EngineState) -> None:
        super().show(state)
        self._changed()
