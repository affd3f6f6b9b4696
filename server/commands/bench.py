"""`quire bench NAME`: finds the benchmark and hands it the rest of the command line."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

BENCHMARKS = {  # name → (module, what it is)
    "serve": ("serving.serve", "a running OpenAI-compatible server under load: latencies and throughput"),
    "throughput": ("offline.throughput", "tokens a second offline, all requests given at once"),
    "latency": ("offline.latency", "one batch offline, from prompts to the last token"),
    "engines": ("offline.engines", "the same work on every engine installed: quire, vllm, transformers, llama.cpp"),
    "servers": ("serving.servers", "the servers of several engines under the same client, beside their offline speed"),
    "scale": ("offline.scale", "one model on 1, 2, 4 GPUs: speed-up and efficiency, tensor and data parallel"),
    "startup": ("serving.startup", "from the command `quire serve` to the first token"),
    "server-path": (
        "micro.server_path",
        "what a token costs between engine and socket, with an engine that has no model",
    ),
    "kernels": ("micro.kernels", "the attention kernels (GPU) or experts alone, beside the device's limits"),
    "compare": ("report.compare", "two result files: ratios, better or worse, significance"),
    "plot": ("report.plot", "result files as pictures (needs matplotlib: pip install 'quire[plot]')"),
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed",
        description="Measure speed. Each benchmark has its own --help.",
        epilog="benchmarks:\n" + "\n".join(f"  {name:<12} {text}" for name, (_, text) in BENCHMARKS.items()),
    )
    parser.add_argument("benchmark", choices=list(BENCHMARKS), metavar="BENCHMARK", help="one of those below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of the benchmark")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    module, _ = BENCHMARKS[args.benchmark]
    return int(importlib.import_module(f"benchmarks.{module}").main(args.rest))
