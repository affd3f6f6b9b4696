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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from engine.replicas.heartbeat import Heartbeat
from engine.replicas.link import Link
from engine.replicas.messages import Shutdown

ENGINE_MODULE = "engine.replicas.process_main"  # the module that the child process runs
EXIT_SECONDS = 10  # time for the engine process to exit by itself
PROC = Path("/proc")


class ChildProcess:
    """A child process with its two sockets, heartbeat and lifeline. Use it in the event loop that created it."""

    def __init__(
        self, module: str, environment: Mapping[str, str] | None = None, *, pass_fds: Sequence[int] = ()
    ) -> None:
        """`module`: what it runs, with the addresses of the sockets, the heartbeat's file and the descriptors in
        `pass_fds` as arguments. `environment`: variables for it, in addition to those of this process.
        """
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
            [
                sys.executable,
                "-P",
                "-m",
                module,
                commands,
                events,
                str(self._folder / "heartbeat"),
                *map(str, pass_fds),
            ],
            stdin=subprocess.PIPE,
            pass_fds=pass_fds,
            process_group=0,  # the terminal's Ctrl-C goes to the parent only, even before the child can ignore it
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._link = Link(self._commands, self._events)
        self.exited: asyncio.Future[str] = self._loop.create_future()  # how the process ended
        threading.Thread(target=self._wait, name="engine process watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, command: Any) -> None:
        """Send a command, see `Link.send`; `Shutdown` at once."""
        self._link.send(command, at_once=isinstance(command, Shutdown))

    def listen(self, take: Callable[[bytes], None]) -> None:
        """Pass each message of the process to `take`, see `Link.listen`."""
        self._link.listen(take)

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
        self._link.close()
        self._commands.close()
        self._events.close()
        self._context.term()
        self.remove_files()


class EngineProcess(ChildProcess):
    """A process of an engine."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(ENGINE_MODULE, environment)


def _described(code: int) -> str:
    """Describe an exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    how = f"was killed by {signal.Signals(-code).name}"
    return f"{how} (perhaps the machine ran out of memory)" if -code == signal.SIGKILL else how
