"""Block files of several ranks, each with its part of the same blocks. Rank 0's file calls the followers' files."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.worker.block_store.block_file import BlockFileOptions
from engine.worker.parallel.losses import Answers


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A message to a follower: open its own file."""

    options: BlockFileOptions


@dataclass(frozen=True, slots=True)
class FileCall:
    """A message to a follower: call this method of its file of a pool's blocks."""

    pool: int
    method: str
    arguments: tuple[Any, ...]


def of_rank(options: BlockFileOptions, rank: int, part: str, folder: Path) -> BlockFileOptions:
    """Return the options of a rank's file. `part`: its part of the model. `folder`: the model's, on its machine."""
    identity = {**options.identity, "part of the model": part}
    return replace(options, path=Path(f"{options.path}.rank{rank}"), folder=folder, identity=identity)


class Followers:
    """The `Peers` of rank 0's file."""

    def __init__(self, pool: int, send: Callable[[FileCall], None], answers: Sequence[Answers]) -> None:
        """`send`: sends a call to all followers, between steps. `answers`: a queue for each follower."""
        self._pool, self._send, self._answers = pool, send, answers

    def tell(self, method: str, *arguments: Any) -> None:
        self._send(FileCall(self._pool, method, arguments))

    def agree(self, numbers: Sequence[int]) -> Sequence[int]:
        return [min(each) for each in zip(numbers, *(answers.get() for answers in self._answers), strict=True)]


class Leader:
    """A follower's connection to rank 0, for heartbeats and for replies as the `Peers` of its file. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def beat(self) -> None:
        """Send a heartbeat, an empty message. Raises OSError if rank 0 is gone."""
        self._send(b"")

    def tell(self, method: str, *arguments: Any) -> None:
        pass

    def agree(self, numbers: Sequence[int]) -> Sequence[int]:
        self._send(json.dumps(list(numbers)).encode())
        return numbers

    def report(self, report: dict[str, Any]) -> None:
        """Send what is no answer to a message, see `Watch`."""
        with contextlib.suppress(OSError):  # rank 0 is gone
            self._send(json.dumps(report).encode())

    def _send(self, data: bytes) -> None:
        with self._lock:
            self._connection.send_bytes(data)
