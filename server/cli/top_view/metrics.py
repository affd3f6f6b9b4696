"""Computes rates and latencies from two readings of a server's metrics."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


class Reading:
    """One reading of the metrics. Missing metrics are 0, empty or NaN."""

    def __init__(self, text: str, state: dict[str, Any], at: float) -> None:
        """`text`: of /metrics. `state`: of /readyz. `at`: monotonic seconds."""
        self.state, self.at = state, at
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of all samples with these labels."""
        return sum(value for found, value in self._samples[name] if labels.items() <= found.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums by value of a label."""
        found: dict[str, float] = defaultdict(float)
        for labels, value in self._samples[name]:
            found[labels.get(label, "")] += value
        return dict(found)

    def largest(self, name: str) -> float:
        return max((value for _, value in self._samples[name]), default=0.0)

    def names(self, name: str, label: str) -> list[str]:
        """Return the values of a label."""
        return sorted({labels[label] for labels, _ in self._samples[name] if label in labels})

    def buckets(self, name: str) -> dict[float, float]:
        """Return the cumulative buckets of a histogram."""
        return {float(bound): count for bound, count in self.by(f"{name}_bucket", "le").items() if bound}


@dataclass(frozen=True)
class KeyRow:
    """The usage of one key."""

    name: str
    running: float
    requests: float  # per second, like the next two
    prompt_tokens: float
    generated_tokens: float


@dataclass(frozen=True)
class ProcessRow:
    """The resources of one process."""

    name: str
    memory: float  # bytes
    cores: float  # CPU cores in use
    files: float  # open files


@dataclass(frozen=True)
class Snapshot:
    """The displayed figures. Rates are per second, times in seconds; NaN: no observations."""

    model: str
    state: dict[str, Any]
    running: float
    waiting: float
    deferred: float  # waiting requests whose grammar is being compiled
    oldest_waiting: float
    kv_cache: float  # fraction in use
    hit_rate: float  # fraction of prompt tokens found in the prefix cache
    prompt_tokens: float
    generated_tokens: float
    finished: float
    refused: float
    failed: float
    preempted: float
    first_token: tuple[float, float]  # median, 99th percentile
    between_tokens: tuple[float, float]
    queue: tuple[float, float]
    lag: float  # of the event loop, 99th percentile
    keys: list[KeyRow] = field(default_factory=list)
    processes: list[ProcessRow] = field(default_factory=list)


def compare(before: Reading, now: Reading) -> Snapshot:
    """Compare two readings. A counter that decreased has been reset."""
    seconds = max(now.at - before.at, 1e-9)

    def grown(name: str, **labels: str) -> float:
        total, former = now.total(name, **labels), before.total(name, **labels)
        return total - former if total >= former else total

    def rate(name: str, **labels: str) -> float:
        return grown(name, **labels) / seconds

    def times(name: str) -> tuple[float, float]:
        former = before.buckets(name)
        new = {bound: max(count - former.get(bound, 0.0), 0.0) for bound, count in now.buckets(name).items()}
        return quantile(new, 0.5), quantile(new, 0.99)

    looked_up = grown("vllm:prefix_cache_queries_total")
    return Snapshot(
        model=", ".join(now.names("vllm:num_requests_running", "model_name")),
        state=now.state,
        running=now.total("vllm:num_requests_running"),
        waiting=now.total("vllm:num_requests_waiting"),
        deferred=now.total("vllm:num_requests_waiting_by_reason", reason="deferred"),
        oldest_waiting=now.total("quire:oldest_waiting_seconds"),
        kv_cache=now.largest("vllm:kv_cache_usage_perc"),
        hit_rate=grown("vllm:prefix_cache_hits_total") / looked_up if looked_up else math.nan,
        prompt_tokens=rate("vllm:prompt_tokens_total"),
        generated_tokens=rate("vllm:generation_tokens_total"),
        finished=rate("vllm:request_success_total"),
        refused=rate("vllm:admission_rejections_total"),
        failed=rate("vllm:request_success_total", finished_reason="error"),
        preempted=rate("vllm:num_preemptions_total"),
        first_token=times("vllm:time_to_first_token_seconds"),
        between_tokens=times("vllm:inter_token_latency_seconds"),
        queue=times("vllm:request_queue_time_seconds"),
        lag=times("quire:event_loop_lag_seconds")[1],
        keys=[
            KeyRow(
                name,
                now.total("quire:key_requests_running", key=name),
                rate("quire:key_requests_total", key=name),
                rate("quire:key_prompt_tokens_total", key=name),
                rate("quire:key_generation_tokens_total", key=name),
            )
            for name in now.names("quire:key_requests_total", "key")
        ],
        processes=[
            ProcessRow(
                name,
                now.total("quire:process_resident_memory_bytes", process=name),
                rate("quire:process_cpu_seconds_total", process=name),
                now.total("quire:process_open_fds", process=name),
            )
            for name in now.names("quire:process_open_fds", "process")
        ],
    )


def quantile(buckets: dict[float, float], fraction: float) -> float:
    """Estimate a quantile like Prometheus, by linear interpolation. NaN without observations."""
    bounds = sorted(buckets)
    if not bounds or not (wanted := buckets[bounds[-1]] * fraction):
        return math.nan
    low, below = 0.0, 0.0
    for bound in bounds:
        if (count := buckets[bound]) >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    raise AssertionError("the last bucket holds all")


def busiest(rows: Iterable[KeyRow], most: int) -> list[KeyRow]:
    """Return the keys with the highest usage."""
    return sorted(rows, key=lambda row: (-row.generated_tokens - row.prompt_tokens, -row.running, row.name))[:most]
