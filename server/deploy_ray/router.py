"""Routes a request to the replica with most of its prompt cached, weighed by load; see `engine.replicas.routing`."""

from __future__ import annotations

from functools import partial
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from engine.replicas.routing import Router
from server.deploy_ray.forwarded import ForwardedRequest

CAPACITY_TOKENS = 1_000_000  # assumed capacity of a replica's cache


class PrefixAwareRouter(RequestRouter):  # type: ignore[misc]  # Ray need not be installed where types are checked
    """The router of one ingress replica for one deployment. It estimates what replicas have cached, see `Router`.

    Ray Serve tries the replicas in the router's order, and skips replicas that have `max_ongoing_requests`.
    """

    def initialize_state(self, capacity_tokens: int = CAPACITY_TOKENS) -> None:
        """Initialise the router. `capacity_tokens`: from `request_router_kwargs`."""
        self._router = Router(0, capacity_tokens)
        self._numbers: dict[ReplicaID, int] = {}
        self._unused: list[int] = []

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        for gone in self._numbers.keys() - {replica.replica_id for replica in replicas}:
            number = self._numbers.pop(gone)
            self._router.forget(number)
            self._unused.append(number)
        for replica in replicas:
            if replica.replica_id not in self._numbers:
                number = self._unused.pop() if self._unused else self._router.add_replica()
                self._numbers[replica.replica_id] = number

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        by_number = {self._numbers[replica.replica_id]: replica for replica in candidate_replicas}
        request = _request_of(pending_request)
        return [[by_number[number]] for number in self._router.ranked(request.chunk_names, by_number)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        number = self._numbers.get(replica_id)
        if number is None:
            return
        request, request_id = _request_of(pending_request), pending_request.metadata.internal_request_id
        self._router.assign(request_id, number, request.num_tokens, request.chunk_names)
        end = partial(self._router.end, request_id)
        result.add_done_callback(lambda _: self._event_loop.call_soon_threadsafe(end))


def _request_of(pending: PendingRequest) -> ForwardedRequest:
    (request,) = pending.args
    assert isinstance(request, ForwardedRequest)
    return request
