"""Metrics of processes and of the event loop."""

import asyncio
import os
import time

import pytest
from prometheus_client import CollectorRegistry

from server.observability import processes
from server.observability.processes import EventLoopLag, ProcessesCollector


def test_each_process_is_measured_and_one_that_is_gone_left_out() -> None:
    registry = CollectorRegistry()
    registry.register(ProcessesCollector(lambda: {"api": os.getpid(), "engine": 2**22 + 1}))

    def value(name: str, process: str) -> float | None:
        return registry.get_sample_value(name, {"process": process})

    assert (value("quire:process_resident_memory_bytes", "api") or 0) > 10e6
    assert (value("quire:process_open_fds", "api") or 0) >= 3
    assert (value("quire:process_cpu_seconds_total", "api") or 0) > 0
    assert value("quire:process_open_fds", "engine") is None


def test_a_blocked_event_loop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LAG_INTERVAL", 0.001)
    registry = CollectorRegistry()

    async def main() -> None:
        task = asyncio.create_task(EventLoopLag(registry).watch())
        await asyncio.sleep(0)
        time.sleep(0.06)  # what must never happen
        await asyncio.sleep(0.005)
        task.cancel()

    asyncio.run(main())
    late = registry.get_sample_value("quire:event_loop_lag_seconds_sum")
    assert late is not None
    assert late >= 0.05
