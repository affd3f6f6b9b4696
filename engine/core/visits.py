"""When owners come and go: whether one that is away is likely to come now."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

REMEMBERED = 64  # owners, those that came last
AWAY_SECONDS = 10.0  # after which an owner is not expected any more
NUM_PAUSES = 4  # between its requests, of which the shortest counts
EARLY = 0.75  # of that pause, after which it is expected


@dataclass(slots=True)
class _Owner:
    left: float = -math.inf  # when its last request ended
    expected_from: float = math.inf  # until its pause is over it is not; while it is there, never
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_PAUSES))  # seconds, shorter than AWAY_SECONDS


class Visits:
    """An owner that has asked is expected to ask again after about the shortest of its last pauses, or from the moment on at
    which it left while no pause of it is known; until it has been away for `AWAY_SECONDS`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._owners: OrderedDict[str, _Owner] = OrderedDict()  # the one that came last is last

    def came(self, name: str, arrival: float = 0.0) -> None:
        """It has a request, and had none. `arrival`: of the request, which may have waited for a step to end since; 0: now."""
        owner = self._owners.setdefault(name, _Owner())
        self._owners.move_to_end(name)
        pause = (arrival or self._clock()) - owner.left
        if pause < AWAY_SECONDS:
            owner.pauses.append(max(pause, 0.0))
        owner.expected_from = math.inf
        if len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)

    def left(self, name: str) -> None:
        """Its last request has ended."""
        if (owner := self._owners.get(name)) is not None:
            owner.left = self._clock()
            owner.expected_from = owner.left + EARLY * min(owner.pauses, default=0.0)

    def seconds_to_next(self, now: float) -> float:
        """From when on an owner that is away is expected: 0 if one is already, infinite if none is."""
        times = (owner.expected_from for owner in self._owners.values() if now < owner.left + AWAY_SECONDS)
        return max(min(times, default=math.inf) - now, 0.0)
