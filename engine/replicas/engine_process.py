"""The parent's side of an engine process: starts it, exchanges messages with it, watches it and stops it."""

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

from engine.replicas.heartbeat import Heartbeat
from engine.replicas.messages import Command, Shutdown, encode

ENGINE_MODULE = "engine.replicas.process_main"  # the module that the child process runs
EXIT_SECONDS = 10  # time for the engine process to exit by itself
PROC = Path("/proc")
RECEIVED_AT_ONCE = 16  # most messages in one iteration of the event loop


class EngineProcess:
    """A child process with its two sockets, heartbeat and lifeline. Use it in the event loop that created it."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: variables for the child, in addition to those of this process."""
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))  # accessible to this user only
        commands, events = (f"ipc://{self._folder}/{name}" for name in ("commands", "events"))
        self.heartbeat = Heartbeat(self._folder / "heartbeat")
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        for socket in (self._commands, self._events):
            socket.set_hwm(0)
            socket.linger = 0
        self._commands.reconnect_ivl = 10  # milliseconds between attempts until the child listens
        self._commands.connect(commands)
        self._events.bind(events)
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", ENGINE_MODULE, commands, events, str(self._folder / "heartbeat")],
            stdin=subprocess.PIPE,
            process_group=0,  # the terminal's Ctrl-C goes to the parent only, even before the child can ignore it
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._unsent: list[Command] = []
        self._is_called = False  # whether `_send_rest` is scheduled for the next iteration of the event loop
        self._take: Callable[[bytes], None] = _ignore
        self.exited: asyncio.Future[str] = self._loop.create_future()  # how the process ended
        threading.Thread(target=self._wait, name="engine process watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, command: Command) -> None:
        """Send a command. Each message wakes the process, so only the first command of an iteration of the event loop
        is sent at once; the others follow in one message.
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
        """Pass each message of the process to `take`, in the iteration of the event loop in which it arrives."""
        self._take = take
        self._loop.add_reader(self._events.fileno(), self._receive)
        self._receive()

    def _receive(self) -> None:
        for _ in range(RECEIVED_AT_ONCE):
            if self._closed:
                return
            try:
                message = self._events.recv(zmq.NOBLOCK)
            except zmq.Again:  # only then does the descriptor signal new messages
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
        """Return the CPU ticks used by the process and its descendants; None if the system does not report them."""
        total = None
        for stat in PROC.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.pid:  # the process group
                    total = (total or 0) + sum(map(int, fields[11:15]))
        return total

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process; False if the system does not report it."""
        try:
            return (PROC / str(self.pid) / "stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def remove_files(self) -> None:
        """Delete the files. Both processes have them open, so their names are no longer needed."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        self._popen.kill()

    def close(self, *, kill: bool) -> None:
        """Stop the process, wait for its exit, and release all resources. `kill`: do not send `Shutdown` first."""
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
        self._take = _ignore  # the callback refers to this object and would keep its heartbeat open
        self._commands.close()
        self._events.close()
        self._context.term()
        self.remove_files()


def _ignore(message: bytes) -> None:
    """Discard messages that arrive before `listen` or after `close`."""


def _described(code: int) -> str:
    """Describe an exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    how = f"was killed by {signal.Signals(-code).name}"
    return f"{how} (perhaps the machine ran out of memory)" if -code == signal.SIGKILL else how
