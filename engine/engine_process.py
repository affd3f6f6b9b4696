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
from collections.abc import Mapping
from pathlib import Path

import zmq
import zmq.asyncio

from engine.heartbeat import Heartbeat
from engine.messages import Command, Shutdown, Start, encode

ENGINE_MODULE = "engine.process_main"  # what runs in the other process
EXIT_SECONDS = 10  # that the engine process may take to end by itself
PROC = Path("/proc")


class EngineProcess:
    """The child process, its two sockets, its heartbeat and its lifeline. Belongs to the event loop it is made in."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: variables that the child has besides this process's."""
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))  # only this user may enter it
        commands, events = (f"ipc://{self._folder}/{name}" for name in ("commands", "events"))
        self.heartbeat = Heartbeat(self._folder / "heartbeat")
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._events = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
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
        self.exited: asyncio.Future[str] = self._loop.create_future()  # how the process ended
        threading.Thread(target=self._wait, name="engine process watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, command: Command) -> None:
        """In one message with what else is sent in this iteration of the event loop, since each wakes the process. What begins
        or ends it goes at once.
        """
        self._unsent.append(command)
        if isinstance(command, Start | Shutdown):
            self._send_all()
        elif len(self._unsent) == 1:
            self._loop.call_soon(self._send_all)

    def _send_all(self) -> None:
        commands, self._unsent = self._unsent, []
        if commands and not self._closed:
            self._commands.send(encode(commands), zmq.NOBLOCK)

    async def receive(self) -> bytes:
        return await self._events.recv()

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
        self._commands.close()
        self._events.close()
        self._context.term()
        self.remove_files()


def _described(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    how = f"was killed by {signal.Signals(-code).name}"
    return f"{how} (perhaps the machine ran out of memory)" if -code == signal.SIGKILL else how
