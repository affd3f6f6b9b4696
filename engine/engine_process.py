"""The engine process as its parent has it: started, spoken to, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq

from engine.heartbeat import Heartbeat
from engine.messages import Command, Shutdown, encode

ENGINE_MODULE = "engine.process_main"  # what runs in the other process
EXIT_SECONDS = 10  # that the engine process may take to end by itself
PROC = Path("/proc")
RECEIVED_AT_ONCE = 16  # messages, in one iteration of the event loop


class EngineProcess:
    """The child process, its two sockets, its heartbeat and its lifeline. Belongs to the event loop it is made in."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: variables that the child has besides this process's."""
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))  # only this user may enter it
        commands, events = (f"ipc://{self._folder}/{name}" for name in ("commands", "events"))
        self.heartbeat = Heartbeat(self._folder / "heartbeat")
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        for socket in (self._commands, self._events):
            socket.set_hwm(0)
            socket.linger = 0
        self._commands.reconnect_ivl = 10  # milliseconds between tries until the child listens
        self._commands.connect(commands)
        self._events.bind(events)
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", ENGINE_MODULE, commands, events, str(self._folder / "heartbeat")],
            stdin=subprocess.PIPE,
            process_group=0,  # a terminal's Ctrl-C is for the parent, even before the child can ignore it
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._unsent: list[Command] = []
        self._is_called = False  # `_send_rest`, in the next iteration of the event loop
        self._take: Callable[[bytes], None] = _ignore
        self.exited: asyncio.Future[str] = self._loop.create_future()  # how the process ended
        threading.Thread(target=self._wait, name="engine process watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, command: Command) -> None:
        """The first command in an iteration of the event loop goes at once, all others of it together: each message wakes the
        process.
        """
        self._unsent.append(command)
        if not self._is_called or isinstance(command, Shutdown):
            self._send_all()
        if not self._is_called and not self._loop.is_closed():
            self._is_called = True
            self._loop.call_soon(self._send_rest)

    def _send_rest(self) -> None:
        self._is_called = False
        self._send_all()

    def _send_all(self) -> None:
        commands, self._unsent = self._unsent, []
        if commands and not self._closed:
            self._commands.send(encode(commands), zmq.NOBLOCK)

    def listen(self, take: Callable[[bytes], None]) -> None:
        """Have each message of the process given to `take`, in the very iteration of the event loop in which it has come."""
        self._take = take
        self._loop.add_reader(self._events.fileno(), self._receive)
        self._receive()

    def _receive(self) -> None:
        for _ in range(RECEIVED_AT_ONCE):
            if self._closed:
                return
            try:
                message = self._events.recv(zmq.NOBLOCK)
            except zmq.Again:  # only then the descriptor becomes readable anew
                return
            self._take(message)
        self._loop.call_soon(self._receive)

    def _wait(self) -> None:
        how = _described(self._popen.wait())
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its callers are gone
            self.exited.get_loop().call_soon_threadsafe(self._set_exited, how)

    def _set_exited(self, how: str) -> None:
        if not self.exited.done():
            self.exited.set_result(how)

    def cpu_ticks(self) -> int | None:
        """CPU time that the process and its descendants have used; None where the operating system does not say."""
        total = None
        for stat in PROC.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.pid:  # the process group
                    total = (total or 0) + sum(map(int, fields[11:15]))
        return total

    def remove_files(self) -> None:
        """Both sides have them open: their names in the file system are not needed any more, whatever happens."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        self._popen.kill()

    def close(self, *, kill: bool) -> None:
        """End the process if it has not ended, wait for that, and release everything. `kill`: do not ask it first."""
        if self._closed:
            return
        if kill:
            self._popen.kill()
        else:
            self.send(Shutdown())
        self._closed = True
        try:
            self._popen.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._events.fileno())
        self._take = _ignore  # the other refers to this process, whose heartbeat is open for as long as it lives
        self._commands.close()
        self._events.close()
        self._context.term()
        self.remove_files()


def _ignore(message: bytes) -> None:
    """Takes what comes before `listen`, and after `close`."""


def _described(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    how = f"was killed by {signal.Signals(-code).name}"
    return f"{how} (perhaps the machine ran out of memory)" if -code == signal.SIGKILL else how
