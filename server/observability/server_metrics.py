"""Metrics that exist before a model is loaded: processes, the engine's state, HTTP requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine import EngineState
from engine.replicas.state import PHASES
from server.metrics import HTTPMetrics, ReplicaClient
from server.observability.processes import EventLoopLag, ProcessesCollector


class EngineProcess(Protocol):
    """The part of the engine that is used here."""

    @property
    def replicas(self) -> Sequence[ReplicaClient]: ...
    @property
    def state(self) -> EngineState: ...


class ServerMetrics:
    """A registry; the model's metrics are added once it is loaded."""

    def __init__(self, engine: EngineProcess) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.api_processes: Callable[[], Mapping[str, int]] = dict  # process ids of others, by name
        self.registry.register(ProcessesCollector(lambda: {**_processes(engine), **self.api_processes()}))
        self.registry.register(_StateCollector(lambda: engine.state))
        self.http = HTTPMetrics(self.registry)
        self.lag = EventLoopLag(self.registry)


def _processes(engine: EngineProcess) -> dict[str, int]:
    """Return the current process ids by the processes' names in metrics."""
    pids = [replica.pid for replica in engine.replicas]
    names = ["engine"] if len(pids) == 1 else [f"engine_{index}" for index in range(len(pids))]
    return {"api": os.getpid(), **dict(zip(names, pids, strict=True))}


class _StateCollector(Collector):
    def __init__(self, state: Callable[[], EngineState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        phases = GaugeMetricFamily("quire:engine_state", "1 for what the engine is doing", labels=("state",))
        for phase in PHASES:
            phases.add_metric((phase,), float(phase == state.phase))
        yield phases
        yield CounterMetricFamily("quire:engine_restarts", "Restarts of the engine process", state.num_restarts)
