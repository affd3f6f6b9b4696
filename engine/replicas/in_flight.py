"""Counts the requests sent to the engine that are unfinished, per tenant, and how fast requests finish."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Set
from time import monotonic

NUM_ENDS = 256  # latest finished requests that determine the rate


class InFlight:
    """Counts requests when they are sent, so it is exact at any time, without waiting for the engine process."""

    def __init__(self) -> None:
        self._tenants: dict[str, str] = {}  # request id → tenant
        self._counts: Counter[str] = Counter()  # tenant → number of requests, never 0
        self._times: deque[float] = deque(maxlen=NUM_ENDS + 1)  # monotonic seconds: start of work, then each finish

    def __len__(self) -> int:
        return len(self._tenants)

    def of(self, tenant: str) -> int:
        """Return the number of the tenant's requests."""
        return self._counts[tenant]

    @property
    def tenants(self) -> Set[str]:
        return self._counts.keys()

    def add(self, request_id: str, tenant: str) -> None:
        if not self._tenants:  # idle time does not count for the rate
            self._times.clear()
            self._times.append(monotonic())
        self._tenants[request_id] = tenant
        self._counts[tenant] += 1

    def end(self, request_id: str) -> None:
        """Remove a request that has finished or was aborted. Unknown ids are ignored."""
        tenant = self._tenants.pop(request_id, None)
        if tenant is None:
            return
        self._times.append(monotonic())
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]

    def seconds_until(self, num_ends: int) -> float | None:
        """Estimate the seconds until `num_ends` requests finish, at the recent rate. None: none finished since idle."""
        num_seen = len(self._times) - 1
        return num_ends * (monotonic() - self._times[0]) / num_seen if num_seen > 0 else None
