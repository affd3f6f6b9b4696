"""The interface of the engine that the server uses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from engine import EngineRequest, EngineState, ModelInfo, RequestUpdate, SamplingParams
from engine.core.batch import SchedulerStats
from engine.replicas.in_flight import InFlight
from server.metrics import ReplicaClient


class EngineClient(Protocol):
    """The engine as the server sees it; `engine.AsyncEngine` implements it."""

    in_flight: InFlight
    max_num_seqs: int
    num_blocks: int
    block_size: int

    @property
    def model(self) -> ModelInfo: ...
    @property
    def replicas(self) -> Sequence[ReplicaClient]: ...
    @property
    def stats(self) -> SchedulerStats | None: ...
    @property
    def state(self) -> EngineState: ...
    async def state_change(self, seen: EngineState) -> EngineState: ...
    @property
    def num_requests(self) -> int: ...
    async def prepare(self, sampling: SamplingParams, tenant: str = "") -> SamplingParams: ...
    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]: ...
    async def abort(self, request_id: str) -> None: ...
    async def reset_prefix_cache(self) -> bool: ...
