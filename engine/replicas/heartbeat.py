"""A heartbeat from one process to another without messages: a counter in shared memory.

Its content outlives the process that wrote it.
"""

from __future__ import annotations

import mmap
from pathlib import Path


class Heartbeat:
    """A counter in `file`, which is created if missing. The file may be removed once both processes have it open."""

    def __init__(self, file: Path) -> None:
        with file.open("a+b") as opened:
            opened.truncate(mmap.PAGESIZE)
            self._page = memoryview(mmap.mmap(opened.fileno(), mmap.PAGESIZE))
        self._count = self._page[:8].cast("Q")

    def beat(self) -> None:
        """Increment the counter. Takes 0.1 µs."""
        self._count[0] += 1

    def read(self) -> int:
        """Return the number of beats so far."""
        return self._count[0]

    def end_because(self, reason: str) -> None:
        """Record why this process is about to exit, for cases in which it cannot send a message."""
        data = reason.encode()[: len(self._page) - 9]
        self._page[8 : 9 + len(data)] = data + b"\0"

    @property
    def end_reason(self) -> str:
        """Why the other process exited; "" if it gave no reason."""
        return bytes(self._page[8:]).partition(b"\0")[0].decode(errors="replace")
