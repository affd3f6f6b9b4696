"""Check for GPUs and time calls, for the benchmarks of kernels."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

CALLS, REPLAYS = 20, 7


def need_gpus(program: str, count: int = 1) -> None:
    """Ends the program with one line where PyTorch sees fewer NVIDIA GPUs than `count`."""
    found = torch.cuda.device_count()
    if found < count:
        needed = "an NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"
        sys.exit(f"{program}: needs {needed}; PyTorch sees {found or 'none'} here")


def microseconds(call: Callable[[], object], device: torch.device, calls: int = CALLS) -> float:
    """Median time of a call, µs; on a GPU of `calls` in a CUDA graph, as an engine runs them."""
    call()
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times: list[float] = []
    for _ in range(1 + REPLAYS):
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        graph.replay()
        end_event.record()
        torch.cuda.synchronize()
        times.append(1e3 * start_event.elapsed_time(end_event) / calls)
    return statistics.median(times[1:])  # the first replay uploads the graph
