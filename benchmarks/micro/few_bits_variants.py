"""Times ways to cut up products with int4 weights on a GPU.

    python -m benchmarks.micro.few_bits_variants --tokens 16 32 64 128 256

Each product of a layer of Llama-3.1-8B in CUDA graphs, with more copies of its weight than L2 holds: by
`kernels.gluon.linear.weight_only` for each way to cut it up, with and without bringing x into its order, by what other GPUs
use ("portable"), and by cuBLAS with bfloat16 weights. A result that is not that of "portable" is marked.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import kernels
from benchmarks.gpu import need_gpus
from benchmarks.micro.products import SHAPES, _copies, _microseconds
from kernels import QuantizedWeight
from kernels.cuda import quantized_linear
from kernels.gluon.linear import weight_only as dense
from kernels.gpu.launch import cdiv

Call = Callable[[], Any]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024, 8192])
    parser.add_argument("--form", default="int4 asymmetric")
    args = parser.parse_args(argv)
    need_gpus("benchmarks.micro.few_bits_variants")
    timed = [(t, name) for t in args.tokens for name in SHAPES]
    weights = {name: _copies(args.form, *shape) for name, shape in SHAPES.items()}
    floats = {name: _copies("bfloat16", *shape) for name, shape in SHAPES.items()}
    with kernels.compiling_only():
        for tokens, name in timed:
            for _, make in _variants(name, tokens):
                make(weights[name][0])()
    wrong = 0
    for tokens, name in timed:
        want: Tensor | None = None
        for label, make in _variants(name, tokens):
            line = f"{tokens:5} {name:8} {label:36}"
            try:
                if label == "cuBLAS":
                    x = torch.randn(tokens, SHAPES[name][1], dtype=torch.bfloat16, device="cuda")
                    calls: list[Call] = [functools.partial(torch.mm, x, w.t()) for w in floats[name]]  # type: ignore[union-attr]
                else:
                    calls = [make(weight) for weight in weights[name]]
                    got = calls[0]().float()
                    want = got if want is None else want
                    error = float((got - want).norm() / want.norm())
                    if "x in order" not in label and not error <= 1.2e-2:
                        wrong += 1
                        line += f" WRONG by {error:.1e}"
                print(f"{line} {_microseconds(calls) / len(calls):8.1f} us", flush=True)
            except Exception as error:  # the others shall be timed
                print(f"{line} {type(error).__name__}: {str(error)[:80]}", flush=True)
    return 1 if wrong else 0


def _variants(name: str, tokens: int) -> Iterator[tuple[str, Callable[[Any], Call]]]:
    """Label → what makes a call of a weight."""
    n, k = SHAPES[name]
    swiglu, normed = name == "gate_up", name in ("gate_up", "qkv")
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device="cuda")
    norm = torch.ones(k, dtype=torch.bfloat16, device="cuda") if normed else None
    residual = None if normed else x.new_zeros(tokens, n)

    def portable(weight: QuantizedWeight) -> Call:
        added = None if residual is None else torch.zeros_like(residual)  # the first call's sum; others add to it

        def call() -> Tensor:
            supports = dense.supports
            dense.supports = lambda *_: False
            try:
                return quantized_linear._linear(
                    x, weight, None, norm_weight=norm, eps=1e-6, swiglu=swiglu, residual=added
                )
            finally:
                dense.supports = supports

        return call

    yield "portable", portable
    yield "cuBLAS", lambda weight: lambda: None
    largest = max(1 << (tokens - 1).bit_length(), 32)
    for block_m in (32, 64, 128, 192, 256):
        if block_m > largest or (tokens > 4 * block_m and block_m < 192):
            continue
        tiles = cdiv(tokens, block_m) * cdiv(n // 2 if swiglu else n, dense._own_rows(swiglu))
        for parts in (
            (1,) if swiglu else sorted({max(min(full // tiles, 16, k // 512), 1) for full in (70, 100, 132, 264)})
        ):
            for programs in (1, 2) if block_m <= 64 else (1,):
                config = dense.Config(block_m, dense._stages(block_m, 2, programs), parts, programs)
                label = f"{block_m} tokens, {parts} parts, {programs} programs, {config.stages} stages"
                yield label, functools.partial(_call, x, norm, residual, config, swiglu, True)
                if block_m >= 128:
                    yield f"{label}, x in order", functools.partial(_call, x, norm, residual, config, swiglu, False)


def _call(
    x: Tensor, norm: Tensor | None, residual: Tensor | None, config: dense.Config, swiglu: bool, order: bool,
    weight: QuantizedWeight,
) -> Call:  # fmt: skip
    """The product with the new kernel, which brings x into its order first, or takes it as it is."""

    def call() -> Tensor:
        into = x.new_empty(len(x), len(weight) // (2 if swiglu else 1))
        ordered = dense.in_order(x, weight, norm, 1e-6) if order else x
        dense.launch(ordered, weight, None, into, config, residual=residual, swiglu=swiglu)
        return into

    return call


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
