"""Predicts when idle tenants will send their next requests."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_TENANTS = 64  # the most recent ones
AWAY_SECONDS = 10.0  # a tenant that has been idle for longer is no longer expected
NUM_PAUSES = 4  # kept for each tenant; the shortest counts
EARLY = 0.75  # a tenant is expected after this fraction of its shortest pause


@dataclass(slots=True)
class _Tenant:
    departure: float = -math.inf  # when its last request finished, in monotonic seconds
    expected_from: float = math.inf  # when it becomes expected; infinite while it has requests
    # Seconds from the end of its last request to the arrival of the next one, if below AWAY_SECONDS.
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_PAUSES))


class Arrivals:
    """Tracks the pauses between the requests of recent tenants.

    An idle tenant is expected after about the shortest of its recent pauses, or at once while no pause is known. After
    `AWAY_SECONDS` it is no longer expected.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the latest to arrive is last

    def arrived(self, name: str, arrival: float = 0.0) -> None:
        """Record a tenant's first request after a pause. `arrival`: the request's arrival in monotonic seconds, which
        may be before the current step began; 0: now.
        """
        tenant = self._tenants.setdefault(name, _Tenant())
        self._tenants.move_to_end(name)
        pause = (arrival or self._clock()) - tenant.departure
        if pause < AWAY_SECONDS:
            tenant.pauses.append(max(pause, 0.0))
        tenant.expected_from = math.inf
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)

    def departed(self, name: str) -> None:
        """Record that the tenant's last request has finished."""
        if (tenant := self._tenants.get(name)) is not None:
            tenant.departure = self._clock()
            tenant.expected_from = tenant.departure + EARLY * min(tenant.pauses, default=0.0)

    def seconds_to_next(self, now: float) -> float:
        """Return the seconds until an idle tenant is expected: 0 if one is expected now, infinite if none is."""
        times = (tenant.expected_from for tenant in self._tenants.values() if now < tenant.departure + AWAY_SECONDS)
        return max(min(times, default=math.inf) - now, 0.0)
