"""Keeps an engine process running: watches its exit and its heartbeat, and restarts it when it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from engine.errors import EngineError
from engine.replicas.calls import Calls
from engine.replicas.engine_process import EXIT_SECONDS, EngineProcess
from engine.replicas.messages import Command, Failed, Ready, Reply, Shutdown, Start, Starting, Step, decode_event
from engine.replicas.state import StateHolder

_log = logging.getLogger(__name__)

WINDOW_SECONDS = 600.0  # restarts are counted within this time
MAX_DELAY_SECONDS = 30.0  # before a restart
DRAIN_SECONDS = 1.0  # time for the last messages of a dead process to arrive
MAX_LOOK_SECONDS = 0.5  # longest interval between checks of the heartbeat
# Silence after which other replicas are preferred for new requests: of a stopped process, and of one that may be in a
# long step.
STILL_SECONDS, SILENT_SECONDS = 2.0, 20.0
STOPPED_SECONDS = 7.0  # silence after which a stopped process is lost: it is not working on anything that takes long


class RestartPolicy:
    """Decides when to restart a lost process, and gives up after `most` restarts within ten minutes."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._restarts: deque[float] = deque()

    def next_delay(self) -> float | None:
        """Count a restart and return the seconds to wait before it: 0 for the first one. None: give up."""
        now = self._clock()
        while self._restarts and self._restarts[0] <= now - WINDOW_SECONDS:
            self._restarts.popleft()
        count = len(self._restarts)
        if count >= self.most:
            return None
        self._restarts.append(now)
        return min(2.0 ** (count - 1), MAX_DELAY_SECONDS) if count else 0.0


class Watchdog:
    """Measures how long a heartbeat has been silent.

    Only time in which the watchdog itself runs counts. When the machine sleeps, or this process is busy or stopped,
    that says nothing about the other process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count: int | None = None
        self._looked_at = 0.0
        self._silent = 0.0

    def look(self, count: int, interval: float) -> float:
        """Return the seconds of silence, given the heartbeat's current count.

        Call it every `interval` seconds. Of a longer pause, at most `2 * interval` counts.
        """
        now = self._clock()
        if count != self._count:
            self._count, self._silent = count, 0.0
        else:
            self._silent += min(now - self._looked_at, 2 * interval)
        self._looked_at = now
        return self._silent


class Owner(Protocol):
    """The object that receives the events of the engine process."""

    def started(self, ready: Ready) -> None: ...  # the process accepts commands
    def stepped(self, step: Step) -> None: ...
    def lost(self, reason: str) -> None: ...  # the process and all its requests are lost; another one will start


class Supervisor:
    """Runs one engine process after another for an owner. Bound to an event loop.

    `process`: the current process. `calls`: those of its methods."""

    def __init__(
        self,
        make_process: Callable[[], EngineProcess],
        owner: Owner,
        states: StateHolder,
        policy: RestartPolicy,
        watchdog_timeout: float,
    ) -> None:
        """Create the first process.

        `watchdog_timeout`: seconds without a heartbeat after which a process is killed; 0: no watchdog.
        """
        self._make_process = make_process
        self.process = make_process()
        self._owner, self._states, self._policy = owner, states, policy
        self.watchdog_timeout = watchdog_timeout
        self._takes_commands = False
        self.calls = Calls(self.send)
        self.stands_still = False  # the process, which accepts commands, is stopped or has been silent for long
        self._restart_asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def send(self, command: Command) -> bool:
        """Send a command to the process. Returns False, without sending it, while no process accepts commands."""
        if self._takes_commands:
            self.process.send(command)
        return self._takes_commands

    async def run(self, start: Callable[[], Start]) -> str:
        """Run processes until the policy gives up. Returns why the last one ended. Raises `EngineError`.

        `start`: returns what to tell the next process.
        """
        while True:
            reason = await self._run_process(start())
            if not self._states.has_been_ready:
                raise EngineError(reason)
            delay: float | None = 0.0
            if self._restart_asked.done():
                self._restart_asked = asyncio.get_running_loop().create_future()
            else:
                _log.critical("the engine process was lost: %s", reason)
                delay = self._policy.next_delay()
            if delay is None:
                if self._policy.most:
                    _log.critical("%d restarts within %.0f minutes: giving up", self._policy.most, WINDOW_SECONDS / 60)
                return reason
            self._states.enter("restarting", reason=reason)
            self._owner.lost(reason)
            _log.warning("restarting the engine process%s", f" in {delay:.0f} s" if delay else "")
            await asyncio.sleep(delay)
            self.process = self._make_process()

    def restart(self, reason: str) -> bool:
        """Shut the process down gracefully and start another one.

        Returns False, without any effect, while no process accepts commands.
        """
        if self._takes_commands and not self._restart_asked.done():
            self._restart_asked.set_result(reason)
        return self._takes_commands

    def close(self) -> None:
        """Stop the process and wait for its exit."""
        self.process.close(kill=not self._takes_commands or self._states.state.phase == "unresponsive")
        self._takes_commands = False

    async def _run_process(self, start: Start) -> str:
        """Run the current process until it ends. Returns why it ended."""
        process = self.process
        process.send(start)
        reader = self._listen(process)
        watch = asyncio.create_task(self._watch(process))
        try:
            asked = self._restart_asked
            await asyncio.wait({reader, watch, process.exited, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                process.send(Shutdown())
                await asyncio.wait({process.exited}, timeout=EXIT_SECONDS)
            if process.exited.done():
                await asyncio.wait({reader}, timeout=DRAIN_SECONDS)
            self._takes_commands = False
            reasons = [task.result() for task in (asked, reader, watch) if task.done()]
            process.kill()
            how = await process.exited
        finally:
            reader.cancel()
            watch.cancel()
            self.calls.fail("the engine process was lost")
        process.close(kill=True)
        if said := process.heartbeat.end_reason:
            return said
        return reasons[0] if reasons else f"the engine process {how}{self._moment()}"

    def _signs_of_life(self, process: EngineProcess) -> int | None:
        """Return a number that grows while the process works. None: not known.

        A process that takes commands beats its heartbeat between two steps, and uses the CPU while it goes to sleep or
        wakes up.
        """
        if not self._takes_commands:
            return process.cpu_ticks()
        beats = process.heartbeat.read()
        is_awake = self._states.state.phase in ("ready", "unresponsive")
        return beats if is_awake else beats + (process.cpu_ticks() or 0)

    def _moment(self) -> str:
        return "" if self._states.has_been_ready else " while starting"

    def _listen(self, process: EngineProcess) -> asyncio.Future[str]:
        """Process messages until the process sends the reason for its exit, which becomes the result."""
        reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def take(message: bytes) -> None:
            if reason.done():
                return
            try:
                if (said := self._take(process, message)) is not None:
                    reason.set_result(said)
            except Exception as error:
                reason.set_exception(error)

        process.listen(take)
        return reason

    def _take(self, process: EngineProcess, message: bytes) -> str | None:
        """Process a message. Returns the reason for the process's exit, if that is the message."""
        try:
            event = decode_event(message)
        except ValueError:
            _log.exception("cannot decode a message of the engine process")
            return "the engine process sent an invalid message"
        match event:
            case Step() as step:
                self._owner.stepped(step)
            case Reply() as reply:
                self.calls.reply(reply)
            case Starting(phase, done, total):
                self._states.advance(phase, done / total if total else None)
            case Ready() as ready:
                process.remove_files()
                self._takes_commands, self.stands_still = True, False
                self._states.enter("ready")
                self._owner.started(ready)
            case Failed(message=reason):
                return reason
        return None

    async def _watch(self, process: EngineProcess) -> str:
        """Check that the process is alive, until it has been silent for too long. Returns the reason to kill it.

        A process that accepts commands must beat its heartbeat; before that, it must use the CPU.
        """
        watchdog = Watchdog()
        while True:
            timeout = self.watchdog_timeout
            interval = min(timeout / 8, MAX_LOOK_SECONDS) if timeout else 3600.0
            await asyncio.sleep(interval)
            count = self._signs_of_life(process)
            if not timeout or count is None:
                continue
            silent = watchdog.look(count, interval)
            is_silent = silent >= timeout / 2
            if silent >= timeout:
                seconds = f"{timeout:.0f} s{self._moment()} (--engine-watchdog-timeout)"
                return f"the engine process gave no sign of life for {seconds}"
            is_stopped = silent >= STILL_SECONDS and process.is_stopped()
            self.stands_still = is_stopped or silent >= SILENT_SECONDS
            if silent >= STOPPED_SECONDS and is_stopped:
                return f"the engine process was stopped for {STOPPED_SECONDS:.0f} s{self._moment()}"
            if self._takes_commands and is_silent != (self._states.state.phase == "unresponsive"):
                if is_silent:
                    _log.error("the engine process has given no sign of life for %.0f s", silent)
                self._states.enter("unresponsive" if is_silent else "ready")
