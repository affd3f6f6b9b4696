"""Starts the ranks that follow rank 0, each in a process of its own: here those of this machine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn, Protocol

_log = logging.getLogger(__name__)
EXIT_SECONDS = 10


class LaunchError(Exception):
    """The ranks cannot be started. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a rank runs."""

    host: str
    device_index: int  # of its GPU, among those that its process sees


Lost = Callable[[str], None]  # is told which rank is lost, and how, before rank 0's process ends


class Follower(Protocol):
    """The process of another rank, as rank 0 has it. If it is lost, rank 0's process ends."""

    rank: int
    where: str  # its process
    connection: Connection  # over which it gives signs of life

    def send(self, data: bytes) -> None: ...
    def expect_end(self) -> None: ...  # its end is no failure any more
    def end(self, kill: bool) -> None: ...  # wait until it has ended


class Launcher(Protocol):
    """What starts the ranks of one model."""

    @property
    def locations(self) -> Sequence[Location]: ...  # by rank
    def start(self, lost: Lost) -> Sequence[Follower]: ...  # all but rank 0
    def rendezvous(
        self,
    ) -> AbstractContextManager[str]: ...  # a URL for PyTorch, as long as the ranks look for each other
    def close(self) -> None: ...  # release what the ranks had


class LocalLauncher:
    """Processes of this machine."""

    def __init__(self, num_ranks: int) -> None:
        self.locations = [Location("", rank) for rank in range(num_ranks)]

    def start(self, lost: Lost) -> Sequence[Follower]:
        return [_Process(rank, lost) for rank in range(1, len(self.locations))]

    @contextmanager
    def rendezvous(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="quire-ranks-") as folder:
            yield f"file://{folder}/store"

    def close(self) -> None:
        pass


class _Process:
    """A follower whose standard input is its lifeline: it ends when this process does."""

    def __init__(self, rank: int, lost: Lost) -> None:
        self.rank, self._lost = rank, lost
        self.connection, theirs = Pipe()
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.worker.follower", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            process_group=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()
        self.where = f"pid {self.popen.pid}"
        self._may_end = False
        threading.Thread(target=self._watch, name=f"watch over rank {rank}", daemon=True).start()

    def send(self, data: bytes) -> None:
        self.connection.send_bytes(data)

    def expect_end(self) -> None:
        self._may_end = True

    def end(self, kill: bool) -> None:
        self.expect_end()
        if kill:
            self.popen.kill()
        try:
            self.popen.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.connection.close()
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def _watch(self) -> None:
        code = self.popen.wait()
        if not self._may_end:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            end_without(self, how, self._lost)


def end_without(follower: Follower, how: str, lost: Lost) -> NoReturn:
    """End this process, which has lost a rank: a collective without one of its ranks never ends."""
    reason = f"the process of rank {follower.rank} {how}: {follower.where}"
    _log.critical("%s", reason)
    lost(reason)
    follower.end(kill=True)  # one that is stopped would stay
    logging.shutdown()
    os._exit(1)
