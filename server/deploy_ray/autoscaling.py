"""Autoscaling: the number of replicas follows the waiting requests and the use of the KV cache."""

from __future__ import annotations

from typing import Any

from engine.core.batch import SchedulerStats

KV_CACHE_USAGE = 0.8  # KV cache usage of a replica at its target load


def replica_load(stats: SchedulerStats | None) -> float:
    """Return a replica's load relative to its target. Above 1, there should be more replicas.

    While requests wait, the running ones are all that the replica can handle. Otherwise the usage of the KV cache
    counts.
    """
    if stats is None:
        return 1.0  # restarting: neither idle nor overloaded
    if stats.num_waiting:
        return 1 + stats.num_waiting / max(stats.num_running, 1)
    return stats.kv_cache_usage / KV_CACHE_USAGE


def by_load(context: Any) -> tuple[float, dict[str, Any]]:
    """A Ray Serve autoscaling policy: enough replicas for the sum of all loads, and for `target_ongoing_requests` at
    each. Delays and bounds come from `autoscaling_config`.
    """
    loads = (context.aggregated_metrics or {}).get("load", {})
    requests = context.total_num_requests / context.config.get_target_ongoing_requests()
    return max(sum(loads.values()), requests), {}
