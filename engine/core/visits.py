"""Predicts when an idle owner (API key, user or client address) will send its next request."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

REMEMBERED = 64  # the owners that arrived last
AWAY_SECONDS = 10.0  # an owner idle for longer is no longer expected
NUM_PAUSES = 4  # an owner's last pauses, of which the shortest counts
EARLY = 0.75  # fraction of that pause after which the owner is expected


@dataclass(slots=True)
class _Owner:
    left: float = -math.inf  # when the owner's last request finished
    expected_from: float = math.inf  # infinite while the owner has requests
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_PAUSES))  # seconds, shorter than AWAY_SECONDS


class Visits:
    """Records when owners arrive (get their first unfinished request) and leave (finish their last one).

    An idle owner is expected from `EARLY` times the shortest of its last pauses on, or at once if no pause of it is
    known. It is no longer expected after `AWAY_SECONDS`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._owners: OrderedDict[str, _Owner] = OrderedDict()  # the one that came last is last

    def came(self, name: str, arrival: float = 0.0) -> None:
        """Record that an owner's first request arrived at `arrival`, possibly before this call; 0: now."""
        owner = self._owners.setdefault(name, _Owner())
        self._owners.move_to_end(name)
        pause = (arrival or self._clock()) - owner.left
        if pause < AWAY_SECONDS:
            owner.pauses.append(max(pause, 0.0))
        owner.expected_from = math.inf
        if len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)

    def left(self, name: str) -> None:
        """Record that the owner's last request has finished."""
        if (owner := self._owners.get(name)) is not None:
            owner.left = self._clock()
            owner.expected_from = owner.left + EARLY * min(owner.pauses, default=0.0)

    def seconds_to_next(self, now: float) -> float:
        """Return the seconds until an idle owner is expected: 0 if one already is, infinity if none will be."""
        times = (owner.expected_from for owner in self._owners.values() if now < owner.left + AWAY_SECONDS)
        return max(min(times, default=math.inf) - now, 0.0)
