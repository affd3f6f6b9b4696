"""A Ray cluster of two nodes on this machine. `make ray` installs Ray and runs these tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 100 << 20  # of each node's object store


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node of one core, and another one: what needs two cores spans both."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ["PYTHONPATH"] = str(ROOT)  # of the actors
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
    )
    try:
        cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
