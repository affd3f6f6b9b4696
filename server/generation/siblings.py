"""Models that one server serves beside each other, and what their apps share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from server.generation.caller import Caller
from server.generation.model import Model
from server.generation.queue import AdmitsRequests
from server.generation.rate_limits import Limits, RateLimits
from server.observability.requests import RequestLog


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model as lists of models show it."""

    names: Sequence[str]
    created: int  # Unix time
    model: Model | None  # None: it has not been loaded so far
    is_awake: bool
    expires: float | None = None  # Unix time at which it will sleep, if it gets no request before; None: not known

    def names_for(self, caller: Caller) -> list[str]:
        """Return its names and those of the adapters that a caller may use."""
        return [*self.names] if self.model is None else self.model.names_for(caller)


@dataclass(slots=True)
class Siblings:
    """Objects that the apps of several models share. `listed`: all models, in the order of the command line."""

    listed: Callable[[], Sequence[ListedModel]]
    requests: RequestLog = field(default_factory=RequestLog)
    rate_limits: Limits = field(default_factory=RateLimits)
    registries: dict[str, CollectorRegistry] = field(default_factory=dict)  # metrics of each model, by its first name
    queue: AdmitsRequests | None = None  # None: each has its own


class MergedRegistry:
    """The metrics of several registries, each name once. Of samples with the same labels, the first one counts."""

    def __init__(self, registries: Callable[[], Sequence[CollectorRegistry]]) -> None:
        self._registries = registries

    def collect(self) -> list[Metric]:
        found: dict[str, Metric] = {}
        for registry in self._registries():
            for metric in registry.collect():
                known = found.setdefault(metric.name, metric)
                if known is not metric:
                    labelled = {(sample.name, *sorted(sample.labels.items())) for sample in known.samples}
                    known.samples += [
                        sample
                        for sample in metric.samples
                        if (sample.name, *sorted(sample.labels.items())) not in labelled
                    ]
        return list(found.values())
