"""The main process's side of the API processes: starts them, answers what they pass on, and restarts those that end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.core import Metric
from starlette.types import ASGIApp

from engine import AsyncEngine, ConfigError, EngineError
from engine.replicas.calls import Calls
from engine.replicas.engine_process import ChildProcess
from engine.replicas.facts import EngineStatus, facts_of, status_of
from engine.replicas.guest import Guest
from engine.replicas.messages import Abort, Add, Call, Reply, Shutdown
from engine.replicas.remote import METHODS
from engine.replicas.supervisor import STOPPED_SECONDS, RestartPolicy, Watchdog
from server.generation.queue import RequestQueue
from server.generation.rate_limits import RateLimits
from server.generation.server_state import ServerState
from server.observability.readiness import Readiness
from server.processes.forwarding import Forwards
from server.processes.merged_metrics import Series, Sums, added, lasting, merge, of_owner
from server.processes.messages import (
    Body,
    Changed,
    Configure,
    Forward,
    Listening,
    Sent,
    Serve,
    Working,
    decode_said,
)
from server.processes.shared_limits import LimitsHost
from server.settings import ServerConfig

_log = logging.getLogger(__name__)
MODULE = "server.processes.api_process"
TICK_SECONDS = 0.05
ANSWER_SECONDS = 2.0  # for what a process is asked
SILENT_SECONDS = 60.0  # without a heartbeat, after which a process counts as hanging; a stopped one sooner
MAX_RESTARTS = 8  # of each process, within ten minutes


class ApiProcess:
    """One of the API processes, with the requests that it has sent."""

    def __init__(self, pool: ApiProcesses, number: int, listener: socket.socket) -> None:
        self._pool, self._number, self._listener = pool, number, listener
        self._policy, self._watchdog = RestartPolicy(MAX_RESTARTS), Watchdog()
        self._child: ChildProcess | None = None
        self.calls = Calls(self._send_call)
        self._guest: Guest | None = None
        self._limits: LimitsHost | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_listening = self.is_stopping = False
        self._beats = False  # the present process has begun to beat its heartbeat
        self.num_working: int | None = None  # None: not known
        self.sums = Sums()  # its latest metrics
        self.retired = Sums()  # of processes in its place that have ended

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def is_open(self) -> bool:
        """Return whether it may have requests of its own."""
        return self._limits is not None

    def send(self, message: Any) -> None:
        if self._child is not None:
            self._child.send(message)

    def _send_call(self, call: Call) -> bool:
        self.send(call)
        return self._child is not None

    async def run(self) -> None:
        """Run one process after another. Raises `EngineError` if they end too often."""
        while True:
            how = await self._run_process()
            if self.is_stopping:
                return
            delay = self._policy.next_delay() if self.is_listening else None
            if delay is None:
                raise EngineError(f"API process {self._number} {how}" + (" too often" if self.is_listening else ""))
            _log.error("API process %d %s: another one follows it; its clients are cut off", self._number, how)
            await asyncio.sleep(delay)

    def look(self, seconds: float) -> None:
        """End the process if it hangs or is stopped: clients would wait for it. Call it every `seconds`."""
        if self._child is None or not self._beats:
            return
        silent = self._watchdog.look(self._child.heartbeat.read(), seconds)
        if silent >= SILENT_SECONDS or (silent >= STOPPED_SECONDS and self._child.is_stopped()):
            _log.error("API process %d has given no sign of life for %.0f s", self._number, silent)
            self._beats = False
            self._child.kill()

    async def _run_process(self) -> str:
        """Run a process until it ends. Returns how it did."""
        child = self._child = ChildProcess(MODULE, pass_fds=[self._listener.fileno()])
        forwards = Forwards(self._pool.app, self.send)
        self._beats = False
        child.send(Configure(self._pool.settings, self._number, self._pool.count))
        self.open()
        child.listen(lambda message: self._take(message, forwards))
        try:
            return await child.exited
        finally:
            forwards.disconnect()
            self._child = None
            child.close(kill=True)
            self.calls.fail("the API process was lost")
            if self._guest is not None and self._limits is not None:
                self._guest.close()
                self._limits.close()
            self._guest = self._limits = None
            self.num_working = 0 if self.is_stopping else None
            self.retired, self.sums = added(self.retired, lasting(self.sums)), Sums()

    def open(self) -> None:
        """Let the process answer requests, if the engine is ready."""
        server = self._pool.server
        if server is None or self._child is None:
            return
        assert isinstance(server.queue, RequestQueue)
        assert isinstance(server.rate_limits, RateLimits)
        self._guest = self._pool.engine.guests.host(self.send)
        self._limits = LimitsHost(server.queue, server.rate_limits)
        self.send(Serve(facts_of(self._pool.engine), status_of(self._pool.engine)))

    def stop(self) -> None:
        """Let the process end once its connections have."""
        self.is_stopping = True
        self.send(Shutdown())

    def kill(self) -> None:
        self.is_stopping = True
        if self._child is not None:
            self._child.kill()

    def _take(self, message: bytes, forwards: Forwards) -> None:
        for said in decode_said(message):
            match said:
                case Add(request):
                    if self._guest is not None:
                        self._guest.add(request)
                case Abort(request_id):
                    if self._guest is not None:
                        self._guest.abort(request_id)
                case Forward():
                    forwards.begin(said)
                case Body() | Sent():
                    forwards.take(said)
                case Call():
                    task = asyncio.create_task(self._called(said))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case Reply():
                    self.calls.reply(said)
                case Working(num):
                    self.num_working = num
                case Listening():
                    self.is_listening = self._beats = True
                    if self._child is not None:
                        self._child.remove_files()  # a main process that is killed leaves none

    async def _called(self, call: Call) -> None:
        """Call a method for the process."""
        try:
            owner: Any = self._pool.engine if call.method in METHODS else self._limits
            result = await getattr(owner, call.method)(**call.arguments)
            reply = Reply(call.id, result)
        except EngineError as error:
            reply = Reply(call.id, error=str(error))
        except Exception as error:
            _log.error("the call of %s failed", call.method, exc_info=True)
            reply = Reply(call.id, error=type(error).__name__)
        if call.id >= 0:
            self.send(reply)


class ApiProcesses:
    """The API processes of a server. For the command they stand for the HTTP server and its connections."""

    def __init__(self, app: ASGIApp, engine: AsyncEngine, settings: ServerConfig, readiness: Readiness) -> None:
        """`app`: answers what the processes pass on."""
        self.app, self.engine, self.settings, self._readiness = app, engine, settings, readiness
        self.count = settings.api_server_count
        self.server: ServerState | None = None  # None until the engine is ready
        self._processes: list[ApiProcess] = []
        self._told: tuple[EngineStatus, bool] | None = None  # what they know of the engine
        self.should_exit = self.force_exit = self.started = False

    def pids(self) -> Mapping[str, int]:
        """Return the process ids of those that run, by name in metrics."""
        return {f"api_{number}": each.pid for number, each in enumerate(self._processes) if each.pid is not None}

    # ---- as an HTTP server, and its connections ----

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Run until `should_exit`, and the connections have ended. Raises `EngineError` if processes end too often."""
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(each) for each in listening(sockets[0], self.count)]
            self._processes = [ApiProcess(self, number, each) for number, each in enumerate(listeners)]
            running = [asyncio.create_task(each.run()) for each in self._processes]
            try:
                await self._watch(running)
            finally:
                for process in self._processes:
                    process.kill()
                results = await asyncio.gather(*running, return_exceptions=True)
                for error in results:
                    if isinstance(error, BaseException) and self.started:
                        _log.error("%s", error)

    async def _watch(self, running: Sequence[asyncio.Task[None]]) -> None:
        while not self.should_exit:
            done, _ = await asyncio.wait(running, timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises why
            for process in self._processes:
                process.look(TICK_SECONDS)
            self.started = self.started or all(each.is_listening for each in self._processes)
            self._tell()
        for process in self._processes:
            process.stop()
        while not self.force_exit and not all(task.done() for task in running):
            await asyncio.wait(running, timeout=TICK_SECONDS)

    def _tell(self) -> None:
        """Tell the processes what has changed."""
        if self.server is None:
            return
        now = status_of(self.engine), self._readiness.is_draining
        if now != self._told:
            self._told = now
            for process in self._processes:
                process.send(Changed(*now))

    @property
    def num_working(self) -> int:
        """Number of complete requests that are unanswered; at least 1 of a process that has not said it."""
        return sum(1 if each.num_working is None else each.num_working for each in self._processes if each.pid)

    @property
    def is_counted(self) -> bool:
        """Return whether all processes have said how many they have."""
        return all(each.num_working is not None for each in self._processes if each.pid)

    def abort(self) -> None:
        """Close all connections at once."""
        for process in self._processes:
            process.kill()

    # ---- once the engine is ready ----

    def open(self, server: ServerState) -> None:
        """Let the processes answer requests. `server`: the main process's."""
        self.server, server.peers = server, self
        for process in self._processes:
            process.open()

    # ---- as peers of the main process ----

    async def _ask(self, method: str, **arguments: Any) -> list[tuple[ApiProcess, Any]]:
        """Ask all processes. Those that do not answer are left out."""

        async def ask(process: ApiProcess) -> Any:
            with contextlib.suppress(EngineError, TimeoutError):
                return await asyncio.wait_for(process.calls.call(method, **arguments), ANSWER_SECONDS)
            return None

        asked = [each for each in self._processes if each.is_open]
        answers = await asyncio.gather(*map(ask, asked))
        return [(each, answer) for each, answer in zip(asked, answers, strict=True) if answer is not None]

    async def find(self, owner: str | None, request_id: str) -> dict[str, Any] | None:
        """See `Peers`."""
        return next((found for _, found in await self._ask("find", owner=owner, request_id=request_id)), None)

    async def newest(self, owner: str | None, most: int) -> list[dict[str, Any]]:
        """See `Peers`."""
        return [each for _, found in await self._ask("newest", owner=owner, most=most) for each in found]

    async def abort_request(self, caller: str, request_id: str) -> bool:
        """See `Peers`."""
        answers = await self._ask("abort", caller=caller, request_id=request_id)
        return any(was_found for _, was_found in answers)

    async def num_running(self) -> int:
        """See `Peers`."""
        return sum([found for _, found in await self._ask("num_running")])

    async def merged(self, own: Iterable[Metric], owner: str | None) -> list[Metric]:
        """See `Peers`. Of a process that does not answer, its metrics of before count."""
        for process, found in await self._ask("metrics"):
            process.sums = dict(msgspec.convert(found, list[tuple[Series, float]]))
        sums = [each for process in self._processes for each in (process.sums, process.retired)]
        return merge(own, [each if owner is None else of_owner(each, owner) for each in sums])


def listening(first: socket.socket, count: int) -> list[socket.socket]:
    """Return a listening socket for each process. Linux divides new connections among sockets of one port; where there
    is no such division, all processes accept from one socket.

    A process that ends leaves its socket to the next one, so that clients who wait in it are not refused. Raises
    `ConfigError`.
    """
    if sys.platform != "linux" or first.family == socket.AF_UNIX:
        first.listen(BACKLOG)
        return [first.dup() for _ in range(count)]
    address = first.getsockname()
    found: list[socket.socket] = []
    try:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for _ in range(count):
            each = first.dup() if not found else socket.socket(first.family, first.type, first.proto)
            found.append(each)
            if len(found) > 1:
                for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                    each.setsockopt(socket.SOL_SOCKET, option, 1)
                each.bind(address)
            each.listen(BACKLOG)
    except OSError as error:
        for each in found:
            each.close()
        raise ConfigError(f"cannot listen on {address[0]}:{address[1]}: {error.strerror}") from None
    return found


BACKLOG = 2048  # connections that wait to be accepted
