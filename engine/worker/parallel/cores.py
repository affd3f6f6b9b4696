"""The CPU cores that a process may use. Does not import PyTorch."""

from __future__ import annotations

import logging
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container's CPU quota: microseconds, or "max", and period
NODES = Path("/sys/devices/system/node")

_log = logging.getLogger(__name__)


def num_cores() -> int:
    """Return how many cores this process may use, limited by its affinity and its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
        return cores if quota == "max" else min(cores, max(-(-int(quota) // int(period)), 1))
    except (OSError, ValueError):
        return cores


def keep_to_one_node(index: int) -> None:
    """Bind this process to the cores of one NUMA node, and thereby to its memory: that of other nodes is far slower.

    `index`: the replica's index; successive replicas use different nodes. Call it before threads start and weights
    load.
    """
    nodes = numa_nodes()
    if len(nodes) > 1:
        name, cores = list(nodes.items())[index % len(nodes)]
        os.sched_setaffinity(0, cores)
        _log.info("computing on NUMA node %s of %d: %d cores", name, len(nodes), len(cores))


def numa_nodes() -> dict[str, set[int]]:
    """Return the usable cores of each NUMA node that has any, the node with the most cores first."""
    if not hasattr(os, "sched_getaffinity"):
        return {}
    allowed, found = os.sched_getaffinity(0), {}
    for folder in sorted(NODES.glob("node[0-9]*")):
        cores = _listed((folder / "cpulist").read_text()) & allowed
        if cores:
            found[folder.name.removeprefix("node")] = cores
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _listed(text: str) -> set[int]:
    """Parse a list of numbers such as "0-3,8"."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
