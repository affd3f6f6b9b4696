"""A replica's own measurements as Prometheus sees them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from server.metrics import Metrics
from tests.support.fake_engine import FakeEngine


def test_tokens_of_each_expert_are_a_histogram_for_each_layer() -> None:
    replica, registry = FakeEngine(), CollectorRegistry()
    Metrics(registry, "toy", [replica], max_model_len=64, block_size=16)
    replica.expert_tokens.observe({3: [0, 0, 5, 9000], 7: [1, 1, 1, 1]})

    def value(kind: str, layer: int, **more: str) -> float | None:
        labels = {"model_name": "toy", "engine": "0", "layer": str(layer), **more}
        return registry.get_sample_value(f"quire:expert_tokens_{kind}", labels)

    assert [value("bucket", 3, le=le) for le in ("0.0", "4.0", "8.0", "8192.0", "+Inf")] == [2, 2, 3, 3, 4]
    assert (value("sum", 3), value("count", 3)) == (9005, 4)
    assert [value("bucket", 7, le=le) for le in ("0.0", "1.0", "+Inf")] == [0, 4, 4]
    assert value("count", 4) is None
