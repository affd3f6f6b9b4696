"""The requests that the engine has been sent and that have not ended: how many, of which owners, how fast they end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Set
from time import monotonic

NUM_ENDS = 256  # the newest ends, by which the pace is measured


class Outstanding:
    """Counts what was sent, so it is exact at each moment, whatever the engine process has said of it by then."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}  # of each request, by its id
        self._counts: Counter[str] = Counter()  # by owner, none of them 0
        self._times: deque[float] = deque(maxlen=NUM_ENDS + 1)  # monotonic seconds: when work began, then of each end

    def __len__(self) -> int:
        return len(self._owners)

    def of(self, owner: str) -> int:
        """How many are this owner's."""
        return self._counts[owner]

    @property
    def owners(self) -> Set[str]:
        return self._counts.keys()

    def add(self, request_id: str, owner: str) -> None:
        if not self._owners:  # the time without work says nothing of the pace
            self._times.clear()
            self._times.append(monotonic())
        self._owners[request_id] = owner
        self._counts[owner] += 1

    def end(self, request_id: str) -> None:
        """It has finished, or is wanted no more. Unknown ids are fine."""
        owner = self._owners.pop(request_id, None)
        if owner is None:
            return
        self._times.append(monotonic())
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]

    def seconds_until(self, num_ends: int) -> float | None:
        """How long so many ends take at the pace of the newest ones; None: there was none since the engine was idle."""
        num_seen = len(self._times) - 1
        return num_ends * (monotonic() - self._times[0]) / num_seen if num_seen > 0 else None
