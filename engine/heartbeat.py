"""A sign of life from one process to another, without a message: a counter in memory that both map. What stands there
outlives the process that wrote it.
"""

from __future__ import annotations

import mmap
from pathlib import Path


class Heartbeat:
    """The counter in `file`, made if it is not there; the file may be removed once both processes have it open."""

    def __init__(self, file: Path) -> None:
        with file.open("a+b") as opened:
            opened.truncate(mmap.PAGESIZE)
            self._page = memoryview(mmap.mmap(opened.fileno(), mmap.PAGESIZE))
        self._count = self._page[:8].cast("Q")

    def beat(self) -> None:
        """Another sign of life; takes a tenth of a microsecond."""
        self._count[0] += 1

    def read(self) -> int:
        """Signs of life so far."""
        return self._count[0]

    def end_because(self, reason: str) -> None:
        """Why this process ends now, where no message can say so."""
        data = reason.encode()[: len(self._page) - 9]
        self._page[8 : 9 + len(data)] = data + b"\0"

    @property
    def end_reason(self) -> str:
        """Why the other process ended; "": it did not say."""
        return bytes(self._page[8:]).partition(b"\0")[0].decode(errors="replace")
