"""Predicts when idle owners will send their next requests."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

REMEMBERED = 64  # owners, the most recent ones
AWAY_SECONDS = 10.0  # an owner that has been idle for longer is no longer expected
NUM_PAUSES = 4  # pauses remembered for each owner; the shortest counts
EARLY = 0.75  # an owner is expected after this fraction of its shortest pause


@dataclass(slots=True)
class _Owner:
    left: float = -math.inf  # when its last request finished, in monotonic seconds
    expected_from: float = math.inf  # when it becomes expected; infinite while it has requests
    # Seconds from the end of its last request to the arrival of the next one, if below AWAY_SECONDS.
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_PAUSES))


class Visits:
    """An idle owner is expected after about the shortest of its recent pauses between requests, or at once while no
    pause is known. After `AWAY_SECONDS` it is no longer expected.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._owners: OrderedDict[str, _Owner] = OrderedDict()  # the latest to arrive is last

    def came(self, name: str, arrival: float = 0.0) -> None:
        """Record an owner's first request after a pause. `arrival`: the request's arrival in monotonic seconds, which
        may be before the current step began; 0: now.
        """
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
        """Return the seconds until an idle owner is expected: 0 if one is expected now, infinite if none is."""
        times = (owner.expected_from for owner in self._owners.values() if now < owner.left + AWAY_SECONDS)
        return max(min(times, default=math.inf) - now, 0.0)
