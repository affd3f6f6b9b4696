"""Starts the followers (all ranks except 0), each in its own process. `LocalLauncher` starts them on this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Protocol

_log = logging.getLogger(__name__)
EXIT_SECONDS = 10


class LaunchError(Exception):
    """The ranks cannot be started. The message says how to fix it."""


@dataclass(frozen=True, slots=True)
class Location:
    """The host and device of a rank."""

    host: str
    device_index: int  # index of its GPU among those visible to its process


# Called with the lost rank and the reason. Returns True if rank 0's process goes on; otherwise it exits.
Lost = Callable[[str], bool | None]


class Follower(Protocol):
    """Rank 0's handle of a follower's process. If the follower is lost, see `end_without`."""

    rank: int
    where: str  # describes its process, for messages
    connection: Connection  # for its heartbeats and replies

    def send(self, data: bytes) -> None: ...
    def expect_end(self) -> None: ...  # from now on, its exit is no failure
    def end(self, kill: bool) -> None: ...  # wait until it has exited


class Launcher(Protocol):
    """Starts the ranks of a model."""

    @property
    def locations(self) -> Sequence[Location]: ...  # by rank
    def start(self, lost: Lost) -> Sequence[Follower]: ...  # all ranks except 0
    def rendezvous(self) -> str: ...  # a URL for PyTorch's store, valid until `close`
    def close(self) -> None: ...  # release the resources of the ranks


class LocalLauncher:
    """Starts processes on this machine."""

    def __init__(self, num_ranks: int) -> None:
        self.locations = [Location("", rank) for rank in range(num_ranks)]
        # PyTorch's threads read the store until the ranks disconnect, and if its file is gone, they wait for it. A file
        # in memory, which the followers inherit, is there until all have ended, however they end. It stays open,
        # because PyTorch opens it by its number once more when it destroys a store, which may be after `close`. If the
        # file were closed by then, that number might belong to another file.
        self._store = os.memfd_create("quire-ranks")

    def start(self, lost: Lost) -> Sequence[Follower]:
        return [_Process(rank, lost, self._store) for rank in range(1, len(self.locations))]

    def rendezvous(self) -> str:
        return f"file:///proc/self/fd/{self._store}"

    def close(self) -> None: ...


class _Process:
    """A follower with its standard input as lifeline: it exits when this process does."""

    def __init__(self, rank: int, lost: Lost, store: int) -> None:
        """store: a file descriptor, which the process inherits."""
        self.rank, self._lost = rank, lost
        self.connection, theirs = Pipe()
        root = str(Path(__file__).resolve().parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.worker.parallel.follower", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno(), store],
            process_group=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()
        self.where = f"pid {self.popen.pid}"
        self._may_end, self._ending = False, threading.Lock()
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
        with self._ending:  # who notices the end and who waits for it may be two threads
            self.connection.close()
            assert self.popen.stdin is not None
            self.popen.stdin.close()

    def _watch(self) -> None:
        code = self.popen.wait()
        if not self._may_end:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            end_without(self, f"{how}{_last_words(self.connection)}", self._lost)


def _last_words(connection: Connection) -> str:
    """Return the error that ended a follower's start, in brackets; "": it gave none."""
    with contextlib.suppress(OSError, EOFError, ValueError):
        if connection.poll() and "failed" in (message := json.loads(connection.recv_bytes())):
            return f" ({message['failed']})"
    return ""


def end_without(follower: Follower, how: str, lost: Lost) -> None:
    """Report that a rank is lost, and exit this process: a collective without one of its ranks would wait forever.
    If `lost` says that this process goes on, only the rank's process ends.
    """
    reason = f"the process of rank {follower.rank} {how}: {follower.where}"
    if lost(reason):
        follower.end(kill=True)  # ends waits for it
        return
    _log.critical("%s", reason)
    follower.end(kill=True)  # a stopped process would remain
    logging.shutdown()
    os._exit(1)
