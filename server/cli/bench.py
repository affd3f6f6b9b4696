"""`quire bench NAME`: passes the rest of the command line to a benchmark."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

BENCHMARKS = {  # name → (module, description)
    "serve": ("serving.serve", "latencies and throughput of a running OpenAI-compatible server under load"),
    "throughput": (
        "offline.throughput",
        "offline throughput in tokens per second, with all requests submitted at once",
    ),
    "latency": ("offline.latency", "offline latency of one batch, from the prompts to the last token"),
    "engines": ("offline.engines", "the same workload on every installed engine: quire, vllm, transformers, llama.cpp"),
    "servers": (
        "serving.servers",
        "the servers of several engines with the same client, compared with their offline speed",
    ),
    "scale": ("offline.scale", "one model on 1, 2, 4 GPUs: speed-up and efficiency of tensor and data parallelism"),
    "startup": ("serving.startup", "time from the command `quire serve` to the first token"),
    "server-path": (
        "micro.server_path",
        "cost of a token between engine and socket, measured with an engine without a model",
    ),
    "kernels": ("micro.kernels", "attention kernels (GPU) or experts alone, compared with the device's limits"),
    "compare": ("report.compare", "compare two result files: ratios, better or worse, significance"),
    "plot": ("report.plot", "plot result files (needs matplotlib: pip install 'quire[plot]')"),
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure performance",
        description="Measure performance. Each benchmark has its own --help.",
        epilog="benchmarks:\n" + "\n".join(f"  {name:<12} {text}" for name, (_, text) in BENCHMARKS.items()),
    )
    parser.add_argument("benchmark", choices=list(BENCHMARKS), metavar="BENCHMARK", help="one of the benchmarks below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of the benchmark")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    module, _ = BENCHMARKS[args.benchmark]
    return int(importlib.import_module(f"benchmarks.{module}").main(args.rest))
