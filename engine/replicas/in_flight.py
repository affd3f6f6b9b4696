"""Counts the requests sent to the engine that are unfinished, per owner, and how fast requests finish."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Set
from time import monotonic

NUM_ENDS = 256  # latest finished requests that determine the rate


class InFlight:
    """Counts requests when they are sent, so it is exact at any time, without waiting for the engine process."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}  # request id → owner
        self._counts: Counter[str] = Counter()  # owner → number of requests, never 0
        self._times: deque[float] = deque(maxlen=NUM_ENDS + 1)  # monotonic seconds: start of work, then each finish

    def __len__(self) -> int:
        return len(self._owners)

    def of(self, owner: str) -> int:
        """Return the number of the owner's requests."""
        return self._counts[owner]

    @property
    def owners(self) -> Set[str]:
        return self._counts.keys()

    def add(self, request_id: str, owner: str) -> None:
        if not self._owners:  # idle time does not count for the rate
            self._times.clear()
            self._times.append(monotonic())
        self._owners[request_id] = owner
        self._counts[owner] += 1

    def end(self, request_id: str) -> None:
        """Remove a request that has finished or was aborted. Unknown ids are ignored."""
        owner = self._owners.pop(request_id, None)
        if owner is None:
            return
        self._times.append(monotonic())
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]

    def seconds_until(self, num_ends: int) -> float | None:
        """Estimate the seconds until `num_ends` requests finish, at the recent rate. None: none finished since idle."""
        num_seen = len(self._times) - 1
        return num_ends * (monotonic() - self._times[0]) / num_seen if num_seen > 0 else None
