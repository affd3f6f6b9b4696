"""Time one MoE layer: norm, router, experts and residual sum; on a GPU in CUDA graphs.

    quire bench kernels --sweep experts
    quire bench kernels --sweep experts --shapes qwen3-30b-a3b --forms bfloat16 --tokens 1 8 --profile

Weights are random, so tokens choose their experts almost evenly: the hardest case for few tokens. The floor is the time
in which an H200 (without a GPU: this CPU, by what it reads and multiplies alone) reads the weights of the experts that
were chosen, or multiplies by them, whichever is longer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import kernels
from benchmarks.gpu import microseconds, need_gpus
from benchmarks.result_files import save
from engine.setup.machine import environment
from kernels import ExpertWeight, Kind, QuantizedWeight, Router, RouterArgs, Weight

BYTES_PER_US, FLOPS_PER_US = 4.49e6, 812e6  # measured on an H200: reading, and bfloat16 products
BATCHES = 4  # of different tokens, so that the weights they read are not in L2
COMPRESSED = "compressed bfloat16"


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    inner: int
    count: int
    rule: Router
    forms: tuple[str, ...]
    activation: Any = "silu"
    biased: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(
        2048, 768, 128, Router(8, renormalise=True), ("bfloat16", COMPRESSED, "fp8 blocks", "fp8", "int4")
    ),
    "gpt-oss-20b": Shape(2880, 2880, 32, Router(4, "softmax_chosen"), ("mxfp4", "bfloat16"), "clamped_swiglu", True),
    "glm-4.7-flash": Shape(
        2048, 1536, 64, Router(4, "sigmoid", renormalise=True, scale=1.8), ("bfloat16", "fp8 blocks", "int4")
    ),
    "gemma-4-26b-a4b": Shape(2816, 704, 128, Router(8, renormalise=True), ("bfloat16", "fp8"), "gelu_tanh"),
    "mixtral-8x7b": Shape(4096, 14336, 8, Router(2, "softmax_chosen"), ("bfloat16", "int4")),
    "tiny": Shape(256, 128, 8, Router(2), ("bfloat16", "fp8 blocks", "int4", "mxfp4")),
}
FOR_CPUS = ["tiny"], [1, 8, 64]  # what is measured without a GPU when nothing is asked for: shapes, tokens
FOR_GPUS = [name for name in SHAPES if name != "tiny"], [1, 8, 64, 256, 2048, 8192]

FORMS: dict[str, tuple[Kind, int, int]] = {  # kind, channels in a group (0: all), rows that share a scale
    "fp8": ("e4m3", 0, 1),
    "fp8 blocks": ("e4m3", 128, 128),
    "int4": ("int4", 128, 1),
    "mxfp4": ("e2m1", 32, 1),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="quire bench kernels --sweep experts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, help="default: all that a GPU has memory for; tiny without"
    )
    parser.add_argument("--forms", nargs="+", help="of the weights (default: those the shape is published in)")
    parser.add_argument("--tokens", type=int, nargs="+", help=f"default: {FOR_GPUS[1]}, without a GPU {FOR_CPUS[1]}")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel, run alone")
    parser.add_argument("--output-json", metavar="FILE", help="where to save the results")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.profile:
        need_gpus("quire bench kernels --sweep experts --profile")
    shapes, counts = FOR_GPUS if device.type == "cuda" else FOR_CPUS
    rates = (BYTES_PER_US, FLOPS_PER_US) if device.type == "cuda" else rates_of_cpu()
    print(f"floors by {rates[0] / 1e6:.3g} TB/s and {rates[1] / 1e6:.3g} TFLOP/s in bfloat16", flush=True)
    rows: list[dict[str, Any]] = []
    for name in args.shapes or shapes:
        for form in args.forms or SHAPES[name].forms:
            layer = Layer(SHAPES[name], form, device, rates)
            for tokens in args.tokens or counts:
                row: dict[str, Any] = {"shape": name, "form": form, "tokens": tokens, **layer.measure(tokens)}
                rows.append(row)
                print(
                    f"{name:15} {form:16} {tokens:5} tokens {row['us']:9.1f} us, floor {row['floor_us']:8.1f} "
                    f"({100 * row['floor_us'] / row['us']:3.0f} %), {row['tflops']:6.1f} TFLOP/s",
                    flush=True,
                )
                if args.profile:
                    layer.print_kernels(tokens)
            del layer
    if args.output_json:
        save({"benchmark": "experts", "rows": rows, "environment": environment()}, args.output_json)
    return 0


class Layer:
    """Random weights of one layer, and calls of it."""

    def __init__(self, shape: Shape, form: str, device: torch.device, rates: tuple[float, float]) -> None:
        """rates: bytes and operations of the device in a microsecond, for the floor."""
        self.shape, self.device, self.rates = shape, device, rates
        self.router = _random(device, shape.count, shape.hidden) * shape.hidden**-0.5
        self.norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)
        gate_up = expert_weights(form, shape.count, 2 * shape.inner, shape.hidden, device)
        down = expert_weights(form, shape.count, shape.hidden, shape.inner, device)
        self.gate_up: ExpertWeight = gate_up
        self.down: ExpertWeight = down
        self.biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if shape.biased:
            self.biases = _random(device, shape.count, 2 * shape.inner), _random(device, shape.count, shape.hidden)
        else:
            compressed = kernels.compress_experts(gate_up, down) if form == COMPRESSED else None
            self.gate_up, self.down = compressed or kernels.pack_experts(gate_up, down, torch.bfloat16)

    def call(self, hidden: Tensor) -> Tensor:
        """The ids that were chosen; the experts' sum is added to `hidden`."""
        normed, ids, weights = kernels.norm_route(hidden, self.norm, 1e-6, RouterArgs(self.router, self.shape.rule))
        stack = kernels.Experts(self.gate_up, self.down, *self.biases, self.shape.activation)
        kernels.experts(normed, ids, weights, stack, hidden)
        return ids

    def measure(self, tokens: int) -> dict[str, float]:
        batches = [_random(self.device, tokens, self.shape.hidden) for _ in range(BATCHES)]
        chosen = [len(self.call(batch).unique()) for batch in batches]
        us = microseconds(_all(self.call, batches), self.device) / BATCHES
        per_expert = (self.gate_up.nbytes + self.down.nbytes) / self.shape.count
        flops = 6 * tokens * self.shape.rule.num_chosen * self.shape.hidden * self.shape.inner
        floor = max(sum(chosen) / BATCHES * per_expert / self.rates[0], flops / self.rates[1])
        return {"us": us, "floor_us": floor, "tflops": flops / us / 1e6}

    def print_kernels(self, tokens: int) -> None:
        batch = _random(self.device, tokens, self.shape.hidden)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(5):
                self.call(batch)
            torch.cuda.synchronize()
        for event in recorded.key_averages():
            print(f"    {event.device_time_total / 5:9.1f} us  {event.count / 5:g} x {event.key[:60]}", flush=True)


def _all(call: Callable[[Tensor], Tensor], batches: list[Tensor]) -> Callable[[], None]:
    def calls() -> None:
        for batch in batches:
            call(batch)

    return calls


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def rates_of_cpu() -> tuple[float, float]:
    """Bytes that this CPU reads from memory in a microsecond, and operations of bfloat16 products."""
    cpu = torch.device("cpu")
    large, square, n = torch.zeros(1 << 24), _random(cpu, 512, 512), 512
    found, product = torch.zeros(()), torch.empty_like(square)
    reading = min(microseconds(lambda: _do(torch.amax, large, dim=0, out=found), cpu) for _ in range(3))
    multiplying = min(microseconds(lambda: _do(torch.mm, square, square, out=product), cpu) for _ in range(3))
    return large.nbytes / reading, 2 * n**3 / multiplying


def _do(operation: Callable[..., Any], *args: Any, **options: Any) -> None:
    operation(*args, **options)


def expert_weights(form: str, count: int, n: int, k: int, device: torch.device) -> Weight:
    """[count, n, k] of bfloat16 or a form, of a standard deviation of about k^-0.5."""
    if form in ("bfloat16", COMPRESSED):
        return torch.stack([_random(device, n, k) * k**-0.5 for _ in range(count)])
    kind, group, rows = FORMS[form]
    group = group or k
    scale = torch.rand(count, -(-n // rows), -(-k // group), device=device) * k**-0.5
    if kind == "e4m3":
        codes = torch.stack([_random(device, n, k).to(torch.float8_e4m3fn) for _ in range(count)])
    else:
        codes = torch.randint(256, (count, n, k // 2), dtype=torch.uint8, device=device)
    if rows == 1:
        scale = kernels.by_groups(scale if group == k else scale.half())
    return QuantizedWeight(kind, codes, scale, group, rows, rounds_activations=kind == "e4m3")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
