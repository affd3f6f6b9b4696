"""Metrics of the server's processes: memory, CPU time, open files, event loop lag."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PROC = Path("/proc")
LAG_INTERVAL = 0.25  # seconds between two measurements
_LAGS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ProcessesCollector(Collector):
    """Reads Linux's /proc on each scrape. Reports nothing on other systems, or for a process that has exited."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        """`pids`: returns the current processes by name."""
        self._pids = pids

    def collect(self) -> Iterator[Metric]:
        labels = ("process",)
        memory = GaugeMetricFamily("quire:process_resident_memory_bytes", "Memory that is resident", labels=labels)
        cpu = CounterMetricFamily("quire:process_cpu_seconds", "CPU time, of user and system", labels=labels)
        files = GaugeMetricFamily("quire:process_open_fds", "Open file descriptors", labels=labels)
        for name, pid in self._pids().items():
            folder = PROC / str(pid)
            try:
                pages = int((folder / "statm").read_text().split()[1])
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
                num_files = len(os.listdir(folder / "fd"))
            except OSError:
                continue
            memory.add_metric((name,), pages * os.sysconf("SC_PAGE_SIZE"))
            ticks = int(after_name[11]) + int(after_name[12])
            cpu.add_metric((name,), ticks / os.sysconf("SC_CLK_TCK"))
            files.add_metric((name,), num_files)
        yield from (memory, cpu, files)


class EventLoopLag:
    """Measures how late the event loop wakes up. Every request waits for that long."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "quire:event_loop_lag_seconds", "Lateness of the API process's event loop", buckets=_LAGS, registry=registry
        )

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self._seconds.observe(max(time.monotonic() - due, 0.0))
