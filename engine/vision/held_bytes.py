"""Memory that the images of unfinished requests hold, divided fairly among callers."""

from __future__ import annotations

from threading import RLock

from engine.core.fairness.tenants import group_of


class HeldBytes:
    """Counts the bytes of each caller. Thread-safe.

    A caller may take more while it holds less than what is free: alone it gets half of the memory, two get a third
    each, and whoever comes next still finds some.
    """

    def __init__(self) -> None:
        self.total = 0
        self._of_caller: dict[str, int] = {}
        self._lock = RLock()  # a prompt may be forgotten while it is held

    def add(self, tenant: str, num_bytes: int) -> None:
        """`num_bytes`: negative for those that are released."""
        caller = group_of(tenant)
        with self._lock:
            self.total += num_bytes
            self._of_caller[caller] = self._of_caller.get(caller, 0) + num_bytes
            if not self._of_caller[caller]:
                del self._of_caller[caller]

    def may_take(self, tenant: str, most: int) -> bool:
        """Return whether a caller may take more. `most`: bytes of all callers together."""
        with self._lock:
            return self._of_caller.get(group_of(tenant), 0) < most - self.total
