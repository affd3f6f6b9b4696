"""What the engine is doing: starting, and how far it is; ready; gone. For health checks, progress pages and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

STARTING = ("starting", "downloading", "loading", "profiling", "compiling", "capturing")  # phases of a start
PHASES = (*STARTING, "ready", "restarting", "unresponsive", "dead")


@dataclass(frozen=True, slots=True)
class EngineState:
    """One moment. After the first start a phase of starting belongs to a restart, and `num_restarts` is not 0."""

    phase: str = "starting"  # one of PHASES
    fraction: float | None = None  # of the phase that is done, from 0 to 1; None: not known
    # Estimated: until "ready" where a start of the same settings is remembered, else until the phase ends. None: not known.
    seconds_left: float | None = None
    num_restarts: int = 0  # of the engine process, so far
    reason: str = ""  # why the engine process was lost last
    at: float = field(
        default=0.0, compare=False
    )  # monotonic seconds: when it began to be so, and `seconds_left` was right

    def seconds_left_at(self, now: float) -> float | None:
        """The estimate at a later moment, in monotonic seconds; None: not known, or it was too low."""
        if self.seconds_left is None or (left := self.seconds_left - (now - self.at)) <= 0:
            return None
        return left

    @property
    def is_ready(self) -> bool:
        """Whether requests are worked on at this moment."""
        return self.phase == "ready"


def combined(states: Sequence[EngineState], has_started: bool) -> EngineState:
    """That of several replicas together. While they start for the first time: the one that is least far. From then on
    requests are worked on while any of them is ready.
    """
    order = ("ready", "unresponsive", *reversed(STARTING), "restarting", "dead")
    shown = min(states, key=lambda state: order.index(state.phase))
    if not has_started:
        shown = max(states, key=lambda state: order.index(state.phase))
    latest = max(states, key=lambda state: (bool(state.reason), state.at))
    return replace(shown, num_restarts=sum(state.num_restarts for state in states), reason=latest.reason)


class StateBoard:
    """Shows the present state, for anyone to wait for the next one. Belongs to an event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = EngineState()
        self._clock = clock
        self._waiters: set[asyncio.Future[None]] = set()

    def show(self, state: EngineState) -> None:
        """This is the state from now on."""
        if state != self.state:
            self.state = replace(state, at=self._clock())
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()

    async def change(self, seen: EngineState) -> EngineState:
        """The present state, once it is another one than `seen`."""
        while self.state == seen:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        return self.state


class StateHolder(StateBoard):
    """The state of one engine, which its one owner changes."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        expected_seconds: float | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`expected_seconds`: that the first start takes, without download; None: not known. `changed`: called after each
        change.
        """
        super().__init__(clock)
        self._expected_seconds, self._changed = expected_seconds, changed
        self._start_began = self._phase_began = clock()
        self.start_seconds: float | None = None  # that the last start took, without download; None: there was none

    @property
    def has_been_ready(self) -> bool:
        return self.start_seconds is not None

    def enter(self, phase: str, *, reason: str | None = None) -> None:
        """Another phase. `reason`: why the process was lost."""
        now, num_restarts = self._clock(), self.state.num_restarts
        if self.state.phase == "downloading":
            self._start_began += now - self._phase_began
        if phase == "restarting":
            self._start_began, num_restarts = now, num_restarts + 1
        elif phase == "ready" and self.state.phase != "unresponsive":
            self.start_seconds = now - self._start_began
        self._phase_began = now
        reason = self.state.reason if reason is None else reason
        self.show(EngineState(phase, None, self._seconds_left(phase, None), num_restarts, reason))

    def advance(self, phase: str, fraction: float | None) -> None:
        """How much of a phase of starting is done. It is entered, if it is another one than before."""
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
            if left > 0:  # else it takes longer this time
                return left
        if not fraction:
            return None
        return (now - self._phase_began) * (1 - fraction) / fraction

    def show(self, state: EngineState) -> None:
        super().show(state)
        self._changed()
