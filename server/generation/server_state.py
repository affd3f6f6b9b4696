"""The state of a server: its model, its settings, and what all requests share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from engine import EngineDeadError, EngineError
from server.generation.caller import Caller
from server.generation.checks import check_admin
from server.generation.engine_client import EngineClient
from server.generation.errors import ConflictError, InvalidRequestError, NotFoundError, UnavailableError
from server.generation.generation import Generation
from server.generation.model import Model
from server.generation.peers import NoPeers, Peers
from server.generation.queue import AdmitsRequests, RequestQueue
from server.generation.rate_limits import Limits, RateLimits
from server.generation.siblings import ListedModel, MergedRegistry, Siblings
from server.metrics import AdapterCollector, ImageCollector, Metrics
from server.observability.readiness import Readiness
from server.observability.recorder import TrafficRecorder
from server.observability.requests import RequestLog
from server.settings import ServerConfig


class ServerState:
    """The objects that all endpoints share."""

    exposed: CollectorRegistry | MergedRegistry  # the metrics to show

    def __init__(
        self,
        model: Model,
        settings: ServerConfig,
        metrics: Metrics,
        readiness: Readiness,
        siblings: Siblings | None = None,
    ) -> None:
        """`siblings`: what it shares with the servers of other models.

        Raises `ConfigError` if the trace cannot be written.
        """
        self.model, self.settings, self.metrics, self.readiness = model, settings, metrics, readiness
        self.engine: EngineClient = model.engine
        self.running: dict[tuple[str, str], Generation] = {}  # by owner and id
        self.exposed = metrics.registry
        self.peers: Peers = NoPeers()
        self.rate_limits: Limits = RateLimits() if siblings is None else siblings.rate_limits
        if siblings is None:
            self.requests = RequestLog()
            metrics.registry.register(self.requests)
        else:
            self.requests = siblings.requests
            model.list_names = lambda caller: [name for each in siblings.listed() for name in each.names_for(caller)]
        self._siblings = siblings
        self.queue: AdmitsRequests = RequestQueue(
            self.engine.in_flight, self.engine.max_num_seqs, settings.max_num_queued_reqs, metrics.rejected
        )
        if siblings is not None and siblings.queue is not None:
            self.queue = siblings.queue
        if self.engine.max_loras:
            metrics.registry.register(AdapterCollector(self.engine.max_loras, self.adapters_in_use))
        images = self.engine.model.images
        counts = (lambda: (0, 0)) if images is None else lambda: (images.num_loads, images.num_hits)
        metrics.registry.register(ImageCollector(model.names[0], counts))
        self.recorder: TrafficRecorder | None = None
        if settings.record_trace is not None:
            self.recorder = TrafficRecorder(Path(settings.record_trace).expanduser(), self.engine.block_size)

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def listed(self) -> Sequence[ListedModel]:
        """Return all models of the server."""
        if self._siblings is not None:
            return self._siblings.listed()
        return [ListedModel(self.model.names, self.model.started, self.model, is_awake=True)]

    async def load(self) -> dict[str, Any]:
        """Return the server's load. Values not yet reported by the engine are 0."""
        stats = self.engine.stats
        return {
            "server_load": len(self.running) + await self.peers.num_running(),
            "num_requests_running": stats.num_running if stats is not None else 0,
            "num_requests_waiting": stats.num_waiting + stats.num_deferred if stats is not None else 0,
            "kv_cache_usage": stats.kv_cache_usage if stats is not None else 0.0,
            "num_blocks": self.engine.num_blocks,
            "num_free_blocks": stats.num_free_blocks if stats is not None else self.engine.num_blocks,
        }

    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Return the names of the adapters with requests that have begun, and of those with requests that wait."""
        running: set[str] = set()
        waiting: set[str] = set()
        for generation in self.running.values():
            if self.model.adapters.find(generation.model) is not None:
                has_begun = any(sample.watch.timings is not None for sample in generation.samples)
                (running if has_begun else waiting).add(generation.model)
        return running, waiting

    async def reset_prefix_cache(self, caller: Caller) -> None:
        """Empty the prefix cache. Raises `NotPermittedError`, `ConflictError` if requests run, `UnavailableError`."""
        check_admin(caller, "emptying the prefix cache")
        try:
            was_reset = await self.engine.reset_prefix_cache()
        except EngineError as error:
            raise UnavailableError(f"the engine is not running: {error}") from None
        if not was_reset:
            raise ConflictError("the prefix cache is in use: requests are running")

    async def sleep(self, level: int, caller: Caller, *, abort: bool) -> None:
        """Free the model's memory until `wake_up`. `abort`: end running requests instead of waiting for them.

        Raises `NotPermittedError`, `InvalidRequestError`, and `UnavailableError` if the engine cannot sleep.
        """
        check_admin(caller, "putting the model to sleep")
        if level not in (1, 2):
            raise InvalidRequestError(f"must be 1 or 2, got {level}", "level")
        try:
            await self.engine.sleep(level, abort=abort)
        except EngineError as error:
            raise UnavailableError(str(error)) from None

    async def wake_up(self, caller: Caller) -> None:
        """End `sleep`. Raises `NotPermittedError`, and `UnavailableError` if the engine cannot wake up."""
        check_admin(caller, "waking the model up")
        try:
            await self.engine.wake_up()
        except EngineError as error:
            raise UnavailableError(str(error)) from None

    async def update_weights(self, path: str, caller: Caller, *, abort: bool) -> None:
        """Replace the model's weights by those in a folder. `abort`: end running requests instead of waiting for them.

        Raises `NotPermittedError`, and `ConflictError` if the weights of before stay.
        """
        check_admin(caller, "replacing the model's weights")
        try:
            await self.engine.update_weights(path, abort=abort)
        except EngineDeadError as error:
            raise UnavailableError(str(error)) from None
        except EngineError as error:
            raise ConflictError(str(error)) from None

    async def record(self, owner: str | None, request_id: str) -> dict[str, Any]:
        """Return a request as `RequestRecord.as_dict`. `owner`: None: of any owner. Raises `NotFoundError`."""
        record = self.requests.find(owner, request_id)
        found = record.as_dict() if record is not None else await self.peers.find(owner, request_id)
        if found is None:
            raise NotFoundError(f"no request {request_id!r} is known, or no longer", "request_id", lead=None)
        return found

    async def newest_records(self, owner: str | None, most: int) -> list[dict[str, Any]]:
        """Return the newest requests, as `RequestRecord.as_dict`."""
        own = [record.as_dict() for record in self.requests.newest(owner, most)]
        theirs = await self.peers.newest(owner, most)
        if not theirs:
            return own
        return sorted([*own, *theirs], key=lambda each: (each["status"] != "running", -each["created"]))[:most]

    async def abort(self, request_id: str, caller: Caller) -> None:
        """Abort a request of `caller`; its client gets the partial output. Raises `NotFoundError` for an unknown id."""
        generation = self.running.get((caller.name, request_id))
        if generation is None and await self.peers.abort_request(caller.name, request_id):
            return
        if generation is None:
            raise NotFoundError(f"no running request has the id {request_id!r}", "request_id", lead=None)
        for sample in generation.samples:
            await self.engine.abort(sample.request_id)
