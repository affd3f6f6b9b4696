"""How many requests are taken at a time, so that those that wait are bounded, and none of their owners has it all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.outstanding import Outstanding
from server.http.errors import APIError

UNKNOWN_SECONDS = 5  # for Retry-After, before the first request has ended
MAX_SECONDS = 600


class RequestQueue:
    """At most `max_num_seqs` requests run and `max_num_queued` wait: a server takes that many together, and refuses more.

    A request for several answers counts as that many. When the queue is full, an owner that has less than its fair part
    of it is still served, so one client cannot lock out the others: with k owners there may be 1 + 1/2 + … + 1/k times
    as many requests.
    """

    def __init__(
        self, outstanding: Outstanding, max_num_seqs: int, max_num_queued: int, refused: Callable[[str], None]
    ) -> None:
        """`refused`: to be told of each refusal, with a word for its reason."""
        self._outstanding, self._refused = outstanding, refused
        self._max_num_seqs, self._most = max_num_seqs, max_num_seqs + max_num_queued
        self._preparing: Counter[str] = Counter()  # requests on their way to the engine, by owner

    @contextmanager
    def entering(self, num_new: int, owner: str) -> Iterator[None]:
        """Counts `num_new` requests until they are sent to the engine, which then counts them, or refused.

        `APIError`: 503 with Retry-After while there are too many, 400 when so many are never taken.
        """
        self._check(num_new, owner)
        self._preparing[owner] += num_new
        try:
            yield
        finally:
            self._preparing[owner] -= num_new
            if not self._preparing[owner]:
                del self._preparing[owner]

    def _check(self, num_new: int, owner: str) -> None:
        if num_new > self._most:
            reason = f"it asks for {num_new} answers, and at most {self._most} are taken at a time"
            raise APIError(400, reason)
        sent, preparing = self._outstanding, self._preparing
        total, own = len(sent) + preparing.total(), sent.of(owner) + preparing[owner]
        if total + num_new <= self._most:
            return
        num_owners = len(sent.owners | preparing.keys() | {owner})
        if own + num_new <= self._most // num_owners:
            return
        self._refused("queue_full")
        num_waiting = max(total - self._max_num_seqs, 0)
        seconds = sent.seconds_until(max(num_waiting, 1))
        retry_after = UNKNOWN_SECONDS if seconds is None else min(max(math.ceil(seconds), 1), MAX_SECONDS)
        reason = (
            f"{num_waiting} requests are waiting, and at most {self._most - self._max_num_seqs} may: "
            f"try again in {retry_after} seconds"
        )
        raise APIError(503, reason, headers={"Retry-After": str(retry_after)})
