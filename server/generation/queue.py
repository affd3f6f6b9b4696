"""Back-pressure: bounds the number of waiting requests, and keeps any one tenant from filling the queue."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Protocol

from engine.core.fairness.tenants import group_of
from engine.replicas.in_flight import InFlight
from server.generation.errors import BusyError, InvalidRequestError

UNKNOWN_SECONDS = 5  # Retry-After before the first request has finished
MAX_SECONDS = 600


class AdmitsRequests(Protocol):
    """Who admits requests: a `RequestQueue`, or that of another process."""

    def admitted(self, num_new: int, tenant: str) -> AbstractAsyncContextManager[None]: ...  # as `entering`


class RequestQueue:
    """Accepts up to `max_num_seqs` running plus `max_num_queued` waiting requests, and rejects the rest.

    A request for several answers counts as that many. A tenant is the API key, user or client address that a request
    is accounted to. When the queue is full, a tenant below its equal part of it is still accepted, so one client cannot
    lock out the others. With k tenants the total can reach 1 + 1/2 + … + 1/k times the limit. Groups of tenants have
    equal parts of the queue, and the tenants of a group equal parts of the group's.
    """

    def __init__(
        self, in_flight: InFlight, max_num_seqs: int, max_num_queued: int, refused: Callable[[str], None]
    ) -> None:
        """`refused` is called for each rejected request, with a one-word reason."""
        self._in_flight, self._refused = in_flight, refused
        self._max_num_seqs, self._most = max_num_seqs, max_num_seqs + max_num_queued
        self._preparing: Counter[str] = Counter()  # requests on their way to the engine, by tenant

    @contextmanager
    def entering(self, num_new: int, tenant: str) -> Iterator[None]:
        """Count `num_new` requests while they are prepared; the engine counts them once they are sent to it.

        Raises `BusyError` while the queue is full, `InvalidRequestError` when `num_new` exceeds the total limit.
        """
        self._check(num_new, tenant)
        self._preparing[tenant] += num_new
        try:
            yield
        finally:
            self._preparing[tenant] -= num_new
            if not self._preparing[tenant]:
                del self._preparing[tenant]

    @asynccontextmanager
    async def admitted(self, num_new: int, tenant: str) -> AsyncIterator[None]:
        """See `entering`."""
        with self.entering(num_new, tenant):
            yield

    def _check(self, num_new: int, tenant: str) -> None:
        if num_new > self._most:
            reason = f"the request asks for {num_new} answers, and this server accepts at most {self._most} at a time"
            raise InvalidRequestError(reason)
        sent, preparing = self._in_flight, self._preparing
        total, own = len(sent) + preparing.total(), sent.of(tenant) + preparing[tenant]
        if total + num_new <= self._most:
            return
        groups = Counter(map(group_of, sent.tenants | preparing.keys() | {tenant}))
        if own + num_new <= self._most // (len(groups) * groups[group_of(tenant)]):
            return
        self._refused("queue_full")
        num_waiting = max(total - self._max_num_seqs, 0)
        seconds = sent.seconds_until(max(num_waiting, 1))
        retry_after = UNKNOWN_SECONDS if seconds is None else min(max(math.ceil(seconds), 1), MAX_SECONDS)
        reason = (
            f"the queue is full ({num_waiting} requests are waiting, at most {self._most - self._max_num_seqs} may): "
            f"try again in {retry_after} seconds"
        )
        raise BusyError(reason, retry_after)
