"""How many replicas a deployment needs: by the requests that wait, and by the KV cache that those at work fill."""

from __future__ import annotations

from typing import Any

from engine.core.batch import SchedulerStats

KV_CACHE_USAGE = 0.8  # of a replica that has as much to do as it should


def replica_load(stats: SchedulerStats | None) -> float:
    """A replica's work, as a multiple of what it should have: above 1 there should be more replicas.

    While requests wait, those that run are all that it can do; otherwise their tokens tell, by the KV cache they fill.
    """
    if stats is None:
        return 1.0  # it starts anew: neither idle nor overloaded
    if stats.num_waiting:
        return 1 + stats.num_waiting / max(stats.num_running, 1)
    return stats.kv_cache_usage / KV_CACHE_USAGE


def by_load(context: Any) -> tuple[float, dict[str, Any]]:
    """A policy of Ray Serve: replicas for all loads, and for `target_ongoing_requests` at each. Delays and bounds are those of
    the `autoscaling_config`.
    """
    loads = (context.aggregated_metrics or {}).get("load", {})
    requests = context.total_num_requests / context.config.get_target_ongoing_requests()
    return max(sum(loads.values()), requests), {}
