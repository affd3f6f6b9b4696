"""The metrics of several API processes as those of one server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client.core import Metric

from server.observability.requests import ANONYMOUS

KEY_USAGE = "quire:key_"  # begins the names of metrics of keys
GAUGES = {  # that add up; the main process alone knows the others
    *("process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds"),
    "quire:key_requests_running",
}
LONGEST = "quire:oldest_waiting_seconds"  # of which the greatest counts
# Of the engine, or with a label for each process.
OWN = {"quire:engine_restarts", "quire:process_cpu_seconds", "python_info"}


class Series(NamedTuple):
    """A sample's names, and its labels by name."""

    metric: str
    sample: str
    labels: tuple[tuple[str, str], ...]


Sums = dict[Series, float]


def sums_of(metrics: Iterable[Metric]) -> Sums:
    """Return what one process adds to the metrics of the server."""
    return {
        Series(metric.name, sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in metrics
        if (metric.type in ("counter", "histogram") or metric.name in {*GAUGES, LONGEST}) and metric.name not in OWN
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def lasting(sums: Sums) -> Sums:
    """Return those that stay when a process has ended: counters never decrease."""
    return {series: value for series, value in sums.items() if series.metric not in {*GAUGES, LONGEST}}


def of_owner(sums: Sums, owner: str) -> Sums:
    """Return them without the usage of other keys."""
    key = ("key", owner or ANONYMOUS)
    return {
        series: value
        for series, value in sums.items()
        if not series.metric.startswith(KEY_USAGE) or key in series.labels
    }


def added(first: Sums, second: Sums) -> Sums:
    """Return the sum of both."""
    return {**first, **{series: first.get(series, 0.0) + value for series, value in second.items()}}


def merge(own: Iterable[Metric], others: Iterable[Sums]) -> list[Metric]:
    """Return the metrics of this process with those of others added."""
    total, longest = Sums(), 0.0
    for sums in others:
        longest = max([longest, *(value for series, value in sums.items() if series.metric == LONGEST)])
        total = added(total, {series: value for series, value in sums.items() if series.metric != LONGEST})
    merged = []
    for metric in own:
        samples, metric.samples = metric.samples, []
        for sample in samples:
            value = sample.value + total.pop(Series(metric.name, sample.name, tuple(sorted(sample.labels.items()))), 0)
            value = max(value, longest) if metric.name == LONGEST else value
            metric.samples.append(sample._replace(value=value))
        for series in [each for each in total if each.metric == metric.name]:  # labels that this process has not seen
            metric.add_sample(series.sample, dict(series.labels), total.pop(series))
        merged.append(metric)
    return merged
