"""Forks of the test process."""

from __future__ import annotations

import gc
import itertools
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

import kernels
from engine.worker.parallel import ranks
from engine.worker.parallel.launcher import Follower, Location, Lost


@contextmanager
def hide_garbage_from_forks() -> Iterator[None]:
    """Keep forks made in this context from collecting garbage of this process.

    Its finalizers may wait for threads, which only this process has: a fork that runs them waits forever. To collect
    it here before each fork would search all that this process has imported, for half a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Fork:
    """A follower in a fork of this process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection, theirs = Pipe()
        # From Python 3.12 on, it warns about threads.
        with hide_garbage_from_forks(), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self._pid = os.fork()
            if self._pid == 0:
                self._follow(theirs)
        self.where = f"pid {self._pid}"
        theirs.close()

    def _follow(self, connection: Connection) -> None:
        code = 1
        gc.freeze()
        gc.enable()
        kernels.FORMS._holders.clear()  # engines of the parent, whose garbage is not collected here
        try:
            ranks.follow(connection)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def send(self, data: bytes) -> None:
        self.connection.send_bytes(data)

    def expect_end(self) -> None:
        pass

    def end(self, kill: bool) -> None:
        if kill:
            os.kill(self._pid, 9)
        assert os.waitpid(self._pid, 0)[1] == 0 or kill
        self.connection.close()


class ForkLauncher:
    """Starts followers as forks, which have the patches of this process."""

    folder: Path  # for the ranks to meet
    meetings = itertools.count()

    def __init__(self, num_ranks: int) -> None:
        self.locations = [Location("", rank) for rank in range(num_ranks)]

    def start(self, lost: Lost) -> Sequence[Follower]:
        return [Fork(location.device_index) for location in self.locations[1:]]

    def rendezvous(self) -> str:
        return f"file://{self.folder}/store-{next(self.meetings)}"  # the ranks remove a file that they have left

    def close(self) -> None:
        pass


def fork_ranks(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """From here on, ranks of engines in this process are forks of it."""
    patch.setattr(ForkLauncher, "folder", folder, raising=False)
    patch.setattr(ranks, "LocalLauncher", ForkLauncher)
    patch.setattr(ranks, "MAX_MISSED", 300)  # a fork that computes lets its heartbeats wait
