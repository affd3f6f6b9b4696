"""Time the four GEMMs of a decoder layer by weight format, in CUDA graphs, beside the time of reading their bytes.

    python -m benchmarks.micro.gemms --forms bfloat16 fp8 int4 --tokens 1 8 64 256

The shapes are those of Llama-3.1-8B. Each GEMM is timed with more copies of its weight than L2 holds; "layer" is all
four one after the other, as in a decoder without attention. µs, and the share of the device's read speed that they
reach.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kernels
from benchmarks.gpu import need_gpus
from benchmarks.result_files import save
from engine.setup.machine import environment
from kernels import Kind, QuantizedWeight, Weight

FORMS: dict[str, tuple[Kind, int, int, bool]] = {  # kind, channels and rows that share a scale (0: all), zero points
    "fp8": ("e4m3", 0, 1, False),
    "fp8 blocks": ("e4m3", 128, 128, False),
    "int8": ("int8", 0, 1, False),
    "int4": ("int4", 128, 1, False),
    "int4 asymmetric": ("int4", 128, 1, True),
    "mxfp4": ("e2m1", 32, 1, False),
}
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
READ = 4.49e12  # bytes a second that an H200 reads
COLD_BYTES = 180e6  # of copies of a weight, three times L2
REPLAYS = 12

Layer = dict[str, list[Weight]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=["bfloat16", *FORMS],
        default=["bfloat16", "fp8", "fp8 blocks", "int4", "int4 asymmetric"],
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 64, 256])
    parser.add_argument("--output-json", metavar="FILE", help="where to save the results")
    args = parser.parse_args(argv)
    need_gpus("benchmarks.micro.gemms")
    rows: list[dict[str, Any]] = []
    for form in args.forms:
        weights = {name: _copies(form, *shape) for name, shape in SHAPES.items()}
        with kernels.compiling_only():
            for tokens in args.tokens:
                for name, copies in weights.items():
                    _call(name, copies[0], tokens)()
        for tokens in args.tokens:
            row = {"form": form, "tokens": tokens, **_times(weights, tokens)}
            rows.append(row)
            times = "  ".join(f"{name} {row[name]:7.1f} ({row[name + '_share']:3.0%})" for name in (*SHAPES, "layer"))
            print(f"{form:18} {tokens:5} tokens: {times}", flush=True)
    if args.output_json:
        save({"benchmark": "products", "rows": rows, "environment": environment()}, args.output_json)
    return 0


def _copies(form: str, n: int, k: int) -> list[Weight]:
    first = _random(form, n, k)
    return [first, *(_random(form, n, k) for _ in range(1, max(round(COLD_BYTES / first.nbytes), 2)))]


def _random(form: str, n: int, k: int) -> Weight:
    """[n, k] of small numbers."""
    if form == "bfloat16":
        return torch.randn(n, k, dtype=torch.bfloat16, device="cuda").mul_(k**-0.5)
    kind, group, rows, zero = FORMS[form]
    group = group or k
    codes = torch.randint(0, 256, (n, k if kind in ("e4m3", "int8") else k // 2), dtype=torch.uint8, device="cuda")
    if kind == "e4m3":
        codes = torch.randn(codes.shape, device="cuda").to(torch.float8_e4m3fn)
    elif kind == "int8":
        codes = codes.view(torch.int8)
    scale = torch.full((n // rows, k // group), 1e-3, device="cuda")
    zeros = torch.randint(-4, 4, (n, k // group), device="cuda", dtype=torch.int8) if zero else None
    scale = scale.half() if k // group > 1 and rows == 1 else scale
    weight = QuantizedWeight(kind, codes, scale, group, rows, zeros, rounds_activations=kind in ("e4m3", "int8"))
    return kernels.pack_weight(weight)


def _call(name: str, weight: Weight, tokens: int) -> Callable[[], Tensor]:
    """One product with what stands around it in a decoder layer."""
    n = len(weight)
    k = weight.shape[1] if isinstance(weight, Tensor) else weight.num_channels
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device="cuda")
    norm, residual = torch.ones(k, dtype=torch.bfloat16, device="cuda"), x.new_zeros(tokens, n)
    if name == "qkv":
        return lambda: kernels.norm_linear(x, norm, 1e-6, weight)
    if name == "gate_up":
        return lambda: kernels.norm_gated(x, norm, 1e-6, weight)
    return lambda: kernels.linear_add(residual, x, weight)


def _times(weights: Layer, tokens: int) -> dict[str, float]:
    """Microseconds of each product and of a layer, and the share of the read speed that each reaches."""
    calls = {name: [_call(name, weight, tokens) for weight in copies] for name, copies in weights.items()}
    num_layers = min(4, *(len(copies) for copies in calls.values()))
    times = {name: _microseconds(each) / len(each) for name, each in calls.items()}
    times["layer"] = _microseconds([calls[name][i] for i in range(num_layers) for name in SHAPES]) / num_layers
    num_bytes = {name: copies[0].nbytes for name, copies in weights.items()}
    num_bytes["layer"] = sum(num_bytes.values())
    return times | {f"{name}_share": 1e6 * num_bytes[name] / READ / times[name] for name in num_bytes}


def _microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """Time of all calls one after the other in a CUDA graph, µs: the median of several replays."""
    for call in calls[:1]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    spans = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return 1e3 * float(spans[len(spans) // 2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
