"""Memory that the images of unfinished requests hold, divided fairly among callers."""

from __future__ import annotations

from threading import RLock


class HeldBytes:
    """Counts the bytes of each caller. Thread-safe.

    A caller may take more while it holds less than what is free: alone it gets half of the memory, two get a third
    each, and the next one still finds some.
    """

    def __init__(self) -> None:
        self.total = 0
        self._of_caller: dict[str, int] = {}
        self._lock = RLock()  # a prompt may be forgotten while it is held

    def add(self, caller: str, num_bytes: int) -> None:
        """`num_bytes`: negative for those that are released."""
        with self._lock:
            self.total += num_bytes
            self._of_caller[caller] = self._of_caller.get(caller, 0) + num_bytes
            if not self._of_caller[caller]:
                del self._of_caller[caller]

    def may_take(self, caller: str, most: int) -> bool:
        """Return whether a caller may take more. `most`: bytes of all callers together."""
        with self._lock:
            return self._of_caller.get(caller, 0) < most - self.total
