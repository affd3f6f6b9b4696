"""The linear layers of Qwen3-8B with LoRA adapters, beside those without, in CUDA graphs of several layers.

    python -m benchmarks.micro.lora --rank 16

For each number of tokens, us for each layer: without adapters as steps without them run it; with one adapter for all
tokens and with as many as there are slots, in each form that the kernels have (`kernels.cuda.choice`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

import kernels
from kernels.cuda import lora
from kernels.cuda.choice import CHOICE

NUM_LAYERS = 6  # together larger than L2
NUM_SLOTS = 32  # by default
FORMS = {
    "one launch": replace(CHOICE, adapted_tokens=0),
    "A in the GEMM": replace(CHOICE, adapted_tokens=0, extended_tokens=1023, extended_share=1.0),
    "A in the GEMM, wide": replace(
        CHOICE, adapted_tokens=0, extended_tokens=1023, extended_share=1.0, extended_wide=True
    ),
    "in the GEMM": replace(CHOICE, adapted_tokens=16, adapted_rank=64),
}


class Layer(NamedTuple):
    """A linear layer [out, in], and its adapters."""

    weight: Tensor
    lora: kernels.LoraWeights
    norm: tuple[Tensor, float]  # before it
    gate: kernels.Gate | None


def layer(rows: tuple[int, ...], channels: int, rank: int, slots: int, gate: kernels.Gate | None = None) -> Layer:
    def random(*shape: int) -> Tensor:
        values: Tensor = torch.randn(shape, device="cuda") / shape[-1] ** 0.5
        return values.bfloat16()

    ends = torch.tensor(rows).cumsum(0).tolist()
    groups = tuple(
        kernels.RowGroup(end - size, end, index) for index, (end, size) in enumerate(zip(ends, rows, strict=True))
    )
    out, device = sum(rows), torch.device("cuda")
    factor, shift = torch.ones(slots, out, device=device), torch.zeros(slots, out, device=device)
    blocks = kernels.LoraWeights.blocks_of(groups, device)
    down, up = random(slots, len(rows) * rank, channels), random(slots, out, rank)
    extended = torch.cat([random(out, channels), down.flatten(0, 1)])
    weights = kernels.LoraWeights(down, up, factor, shift, groups, *blocks, extended)
    norm = torch.ones(channels, dtype=torch.bfloat16, device=device), 1e-6
    return Layer(extended[:out], weights, norm, gate)


def model(rank: int, slots: int) -> list[list[Layer]]:
    return [
        [
            layer((4096, 1024, 1024), 4096, rank, slots),
            layer((4096,), 4096, rank, slots),
            layer((12288, 12288), 4096, rank, slots, "silu"),
            layer((4096,), 12288, rank, slots),
        ]
        for _ in range(NUM_LAYERS)
    ]


def run(layers: list[list[Layer]], hidden: Tensor, tokens: kernels.AdapterTokens | None) -> None:
    """Compute all layers, as the decoder does; the first channels of `qkv` stand for the attention."""
    normed: Tensor | None = None
    for qkv, o, gate_up, down in layers:
        for first, second, following in ((qkv, o, gate_up), (gate_up, down, qkv)):
            step = _plain if tokens is None else partial(_adapted, tokens)
            normed = step(first, second, following, hidden, normed)


def _adapted(
    tokens: kernels.AdapterTokens, first: Layer, second: Layer, following: Layer, hidden: Tensor, normed: Tensor | None
) -> Tensor | None:
    own = first.weight, None, first.lora, tokens
    if normed is None:
        inner = kernels.adapted_linear(hidden, *own, norm=first.norm, gate=first.gate)
    else:
        inner = kernels.adapted_linear(normed, *own, gate=first.gate)
    inner, own = inner[:, : second.weight.shape[1]], (second.weight, None, second.lora, tokens)
    if kernels.fuses_adapters(inner, second.weight, second.lora):
        kernels.adapted_linear(inner, *own, residual=hidden)
        return None
    return kernels.add_rms_norm(hidden, kernels.adapted_linear(inner, *own), *following.norm)


def _plain(first: Layer, second: Layer, following: Layer, hidden: Tensor, normed: Tensor | None) -> Tensor | None:
    gate = first.gate
    if normed is not None:
        inner = kernels.linear_gated(normed, first.weight, None, gate) if gate else kernels.linear(normed, first.weight)
    elif gate is not None:
        inner = kernels.norm_gated(hidden, *first.norm, first.weight, None, gate)
    else:
        inner = kernels.norm_linear(hidden, *first.norm, first.weight)
    inner = inner[:, : second.weight.shape[1]]
    if not kernels.norms_apart(hidden, following.weight, following.gate):
        kernels.linear_add(hidden, inner, second.weight)
        return None
    norm = kernels.NextNorm(*following.norm, None)
    found = kernels.linear_add_norm(hidden, inner, second.weight, None, norm)
    assert isinstance(found, Tensor)
    return found


def us_per_layer(work: Callable[[], None]) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return 1e3 * float(do_bench(graph.replay, return_mode="median")) / NUM_LAYERS


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.lora", description="Linear layers with LoRA adapters, us for each layer."
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 8, 16, 64, 256])
    parser.add_argument("--slots", type=int, default=NUM_SLOTS)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    args = parser.parse_args(argv)
    layers = model(args.rank, args.slots)
    for count in args.tokens:
        hidden = torch.randn(count, 4096, device="cuda").bfloat16()
        plain = us_per_layer(lambda: run(layers, hidden, None))  # noqa: B023 (called at once)
        print(f"{count:4} tokens: {plain:7.1f} us without adapters", flush=True)
        for used in sorted({1, args.slots}):
            slots = torch.arange(count, dtype=torch.int32, device="cuda") % used
            for name in args.forms:
                if name == "in the GEMM" and count > 8:
                    continue
                vars(lora)["CHOICE"] = FORMS[name]
                tokens = kernels.AdapterTokens(slots, args.slots)
                _ = tokens.tiles  # once in a step
                took = us_per_layer(lambda: run(layers, hidden, tokens))  # noqa: B023
                print(f"{used:8} adapters, {name:13} {took:7.1f} us, +{took - plain:5.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
