"""Profile the GPU in a workload: the share it is idle, the kernels, and Triton compiles after warm-up.

    python -m benchmarks.micro.gpu_profile --model qwen3-0.6b --work nano,latency1
    python -m benchmarks.micro.gpu_profile --work decode --trace decode.json.gz    # for https://ui.perfetto.dev

The workload runs once to warm up, once for its time, and once under the profiler. Idle is the share of the profiled
time, from the first kernel to the last, in which no kernel or copy ran; CPU time of a step is the engine's own, without
waiting.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import need_gpus
from benchmarks.model_shapes import model_folder
from benchmarks.result_files import save
from benchmarks.workloads import Request, named
from engine.setup.machine import environment

FIRST_KERNEL = "_prepare_kernel"  # every step begins with it


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel or copy on the device; microseconds."""

    name: str
    start: float
    end: float
    stream: int = 0


def count_compiles() -> list[str]:
    """A list that gains the name of every Triton kernel compiled from now on."""
    import triton

    compiled: list[str] = []

    def hook(*args: Any, **kwargs: Any) -> None:
        compiled.append(str(getattr(kwargs.get("fn"), "name", kwargs.get("repr", "?"))))

    triton.knobs.runtime.jit_post_compile_hook = hook
    return compiled


def busy(events: list[tuple[float, float]]) -> tuple[float, float]:
    """(time in which at least one of the intervals is open, time from the first start to the last end)."""
    events = sorted(events)
    total, reached = 0.0, events[0][0]
    for start, end in events:
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total, reached - events[0][0]


def steady_steps(events: list[Event], count: int = 5) -> list[list[Event]]:
    """`count` steps in a row, each with its events: those without prefill, if there are any, nearest to the middle.

    `ValueError` when there is no step.
    """
    steps: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.start):
        if event.name == FIRST_KERNEL:
            steps.append([])
        if steps:
            steps[-1].append(event)
    if not steps:
        raise ValueError(f"no step, which begins with {FIRST_KERNEL}, is among the {len(events)} events")
    prefills = [any("prefill" in event.name for event in step) for step in steps]
    last = max(len(steps) - count, 0)
    first = min(range(last + 1), key=lambda i: (any(prefills[i : i + count]), abs(i - last / 2)))
    return steps[first : first + count]


def chrome_trace(works: dict[str, list[list[Event]]]) -> dict[str, Any]:
    """Steps of each workload in Chrome's trace format: a process each, with a thread for its steps and for each stream.

    A kernel that begins before the one ahead has ended gets one more thread, since slices of a thread must not overlap.
    """
    rows: list[dict[str, Any]] = []
    for pid, (work, steps) in enumerate(works.items()):
        events = [event for step in steps for event in step]
        active, span = busy([(event.start, event.end) for event in events])
        title = f"{work}: {len(steps)} steps, idle {1 - active / span:.1%}"
        rows.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": title}})
        ends = [step[0].start for step in steps[1:]] + [max(event.end for event in events)]
        shown = [("steps", Event(f"step {i + 1}", step[0].start, ends[i])) for i, step in enumerate(steps)]
        shown += [(f"stream {event.stream}", event) for event in events]
        threads: list[tuple[str, float]] = []  # the name of each, and when it is free
        for thread, event in shown:
            free = [i for i, (name, end) in enumerate(threads) if name == thread and end <= event.start]
            tid = free[0] if free else len(threads)
            if not free:
                threads.append((thread, 0.0))
                rows.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": thread}})
            threads[tid] = (thread, event.end)
            start, end = (round(time - events[0].start, 3) for time in (event.start, event.end))
            rows.append(
                {"name": event.name, "ph": "X", "ts": start, "dur": round(end - start, 3), "pid": pid, "tid": tid}
            )
    return {"displayTimeUnit": "ns", "traceEvents": rows}


def save_trace(trace: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"))
    print(f"saved {path}")


def profile(llm: Any, requests: list[Request]) -> tuple[dict[str, Any], list[Event]]:
    """One workload's time, idle share and kernel table; and what ran on the device."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    from engine import SamplingParams

    inputs = [{"prompt_token_ids": r.prompt} for r in requests]
    output_lens = [r.output_len for r in requests]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False) for n in output_lens]

    def run() -> float:
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - start

    run()
    seconds = run()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [
        Event(e.name, e.time_range.start, e.time_range.end, e.device_resource_id)
        for e in profiler.events()
        if e.device_type.name == "CUDA"
    ]
    active, span = busy([(e.start, e.end) for e in events])
    table: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for e in events:
        entry = table[e.name[:80]]
        entry[0] += e.end - e.start
        entry[1] += 1
    kernels = sorted(table.items(), key=lambda item: -item[1][0])[:15]
    result = {
        "seconds": round(seconds, 4),
        "output_tokens_per_s": round(sum(output_lens) / seconds, 1),
        "gpu_idle": round(1 - active / span, 4),
        "kernels": [
            {"name": name, "ms": round(us / 1e3, 2), "calls": int(n), "us_each": round(us / n, 2)}
            for name, (us, n) in kernels
        ],
    }
    return result, events


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="shape with random weights (benchmarks.model_shapes)")
    parser.add_argument("--work", default="nano,decode", help="named workloads, comma-separated")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs; the first one's time is shown")
    parser.add_argument("--deterministic", action="store_true", help="in deterministic mode")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--output-json", type=Path, help="where to save the results")
    parser.add_argument("--trace", type=Path, metavar="FILE.json.gz", help="where to save five steps of each workload")
    args = parser.parse_args(argv)
    need_gpus("benchmarks.micro.gpu_profile")
    from engine import LLM

    works = [named(name, 10000) for name in args.work.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        llm = LLM(
            model=str(model_folder(args.model, Path(folder))),
            load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
            dtype="bfloat16", gpu_memory_utilization=args.gpu_memory_utilization,
            enable_prefix_caching=any(work.prefix_caching for work in works), kv_offloading_size=0,
            tensor_parallel_size=args.tensor_parallel_size, deterministic=args.deterministic,
        )  # fmt: skip
        results: dict[str, Any] = {"environment": environment(), "model": args.model}
        results["startup_seconds"] = round(time.perf_counter() - start, 2)
    compiled = count_compiles()
    steps: dict[str, list[list[Event]]] = {}
    for work in works:
        result, events = profile(llm, work.requests)
        results[work.name] = result
        if args.trace:
            steps[work.name] = steady_steps(events)
        print(f"{work.name}: {result['output_tokens_per_s']:,} output tokens/s, GPU idle {result['gpu_idle']:.1%}")
        for k in result["kernels"]:
            print(f"  {k['ms']:10.1f} ms {k['calls']:7d} x {k['us_each']:8.2f} µs  {k['name']}")
    results["compiles_after_warm_up"] = compiled
    print(f"Triton compiles after warm-up: {len(compiled)} {compiled}")
    if args.output_json:
        save(results, args.output_json)
    if args.trace:
        save_trace(chrome_trace(steps), args.trace)
    llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
