"""Assigns each request to a replica, or queues it until a replica is ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.replicas.replica import Replica
from engine.replicas.routing import Router
from engine.replicas.streams import RunningStream


class Dispatcher:
    """Assigns requests to replicas. Requests wait here, in order, until the replicas are ready and while none is."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._router: Router | None = None  # None until the replicas are ready
        self._waiting: dict[str, RunningStream] = {}

    def open(self, capacity_tokens: int, max_adapters: int) -> None:
        """Start routing: all replicas are ready. `capacity_tokens`: tokens that the KV cache of each holds.
        `max_adapters`: LoRA adapters that each has in slots.
        """
        self._router = Router(len(self._replicas), capacity_tokens, max_adapters)

    def assign(self, stream: RunningStream) -> None:
        """Assign a request to a replica, or queue it."""
        request = stream.request
        eligible = [replica.index for replica in self._replicas if replica.takes_requests]
        if not eligible or self._router is None:
            self._waiting[request.request_id] = stream
        elif len(self._replicas) == 1:
            self._replicas[0].add(stream)
        else:
            # A replica that stands still finishes nothing, so it soon has the least recent work and would get all
            # requests.
            eligible = [index for index in eligible if not self._replicas[index].stands_still] or eligible
            adapter = "" if request.adapter is None else request.adapter.version
            prompt = request.prompt_name_ids, request.cache_scope
            chosen = self._router.choose(request.request_id, *prompt, eligible, adapter)
            self._replicas[chosen].add(stream)

    def remove(self, stream: RunningStream) -> None:
        """Remove a request that has no reader any more. Aborts it if it is unfinished."""
        request_id = stream.request.request_id
        self.ended(stream)
        self._waiting.pop(request_id, None)
        for replica in self._replicas:
            replica.remove(request_id, abort=not stream.output.finished)

    def ended(self, stream: RunningStream) -> None:
        """Record that a request has its last token."""
        if self._router is not None:
            self._router.end(stream.request.request_id, stream.output.metrics.num_generation_tokens)

    def started(self, replica: Replica) -> None:
        """Record that a replica accepts requests and has an empty cache."""
        if self._router is not None:
            self._router.forget(replica.index)
            self.assign_waiting()

    def assign_waiting(self) -> None:
        """Assign the waiting requests, because another replica accepts requests."""
        waiting, self._waiting = self._waiting, {}
        for stream in waiting.values():
            self.assign(stream)

    def lost(self, replica: Replica, streams: Iterable[RunningStream]) -> None:
        """Assign the requests of a replica that has lost its process."""
        if self._router is not None:
            self._router.forget(replica.index)
        for stream in streams:
            if not stream.output.finished and not stream.is_closed:
                self.ended(stream)
                self.assign(stream)
