"""Checks of GEMMs with GGUF's blocks, at the shapes of Llama-3.1-8B in Q4_K_M, against float64: in the order of
`kernels.data.block_weight`, as integers with scales in float16, and beside AWQ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.testing import do_bench

import kernels
from engine.models.formats import weight_formats
from engine.models.gguf.blocks import TYPES
from engine.models.matrix import Matrix, Part, Scope
from engine.models.quantization import read_quantization
from engine.models.shard import Span
from kernels import Weight, reference
from kernels.cuda import block_linear
from kernels.cuda.choice import CHOICE
from kernels.gluon.linear import block_small_batch
from tests.gpu.checks import BF16, Checks, captured, relative_error
from tests.oracles.random_weights import random_weight
from tests.support.unwritten import unwritten_is_unknown

NUM_TOKENS = (1, 2, 4, 8, 16, 64, 256, 2048)
WARPS = 16, 8, 4  # of a program of the kernel for few tokens
Parts = tuple[tuple[int, str], ...]  # rows and types
LAYERS: dict[str, tuple[str, Parts, int]] = {  # operation, parts, channels
    "qkv, v Q6_K": ("norm", ((4096, "Q4_K"), (1024, "Q4_K"), (1024, "Q6_K")), 4096),
    "qkv": ("norm", ((4096, "Q4_K"), (1024, "Q4_K"), (1024, "Q4_K")), 4096),
    "o": ("add", ((4096, "Q4_K"),), 4096),
    "gate_up": ("gated", ((14336, "Q4_K"), (14336, "Q4_K")), 4096),
    "down": ("add", ((4096, "Q4_K"),), 14336),
    "down Q6_K": ("add", ((4096, "Q6_K"),), 14336),
    "head Q6_K": ("plain", ((128256, "Q6_K"),), 4096),
    "gate_up Q8_0": ("gated", ((14336, "Q8_0"), (14336, "Q8_0")), 4096),
    "down Q5_K": ("add", ((4096, "Q5_K"),), 14336),
    "odd Q4_K": ("norm", ((1000, "Q4_K"), (24, "Q5_K"), (8, "Q8_0")), 2816),
}


def check_block_layers(
    checks: Checks, num_tokens: Sequence[int] = NUM_TOKENS, layers: dict[str, tuple[str, Parts, int]] = LAYERS
) -> None:
    """Check both layouts of each layer and number of tokens, and time them beside AWQ."""
    for name, (operation, parts, k) in layers.items():
        counts = [
            count for count in num_tokens if checks.wants(_name(name, count)) and (count <= 64 or "head" not in name)
        ]
        if not counts:
            continue
        blocks = _blocks(parts, k, checks.device)
        weights = {"new": _packed(blocks, parts, k, True), "old": _packed(blocks, parts, k, False)}
        exact = torch.cat(
            [TYPES[kind].decode(each.flatten(1)).double() for each, (_, kind) in zip(blocks, parts, strict=True)]
        )
        file = sum(each.nbytes for each in blocks)
        if checks.device != "cpu":
            n = len(exact)
            awq = torch.randn(n, k, dtype=BF16, device=checks.device) if "head" in name else None
            weights["AWQ"] = random_weight("int4 asymmetric", n, k, checks.device) if awq is None else awq
            with kernels.compiling_only():
                for weight in weights.values():
                    for _, call in _calls(checks, operation, weight, counts):
                        call()
                for count in WARPS:
                    with _with_warps(count):
                        for x, call in _calls(checks, operation, weights["new"], counts):
                            if len(x) <= 8:
                                call()
        calls = [_calls(checks, operation, weight, counts) for weight in weights.values()]
        for count, of_count in zip(counts, zip(*calls, strict=True), strict=True):
            x = of_count[0][0]
            _check(
                checks,
                _name(name, count),
                operation,
                exact,
                x,
                dict(zip(weights, (call for _, call in of_count), strict=True)),
                file,
            )


def _name(layer: str, count: int) -> str:
    return f"gguf: {layer}, {count} tokens"


def _blocks(parts: Parts, k: int, device: str) -> list[Tensor]:
    """Random blocks of each part."""
    matrix = _matrix(parts, k, device)
    matrix.format.fill_randomly(matrix, torch.Generator(device).manual_seed(0))
    return [matrix.stored[i, "blocks"] for i in range(len(parts))]


def _matrix(parts: Parts, k: int, device: str) -> Matrix:
    types: dict[str, list[str]] = {}
    for i, (_, kind) in enumerate(parts):
        types.setdefault(kind, []).append(f"part{i}")
    formats = weight_formats(read_quantization({"quant_method": "gguf", "types": types}))
    rows = [Part(name=f"part{i}", rows=Span.whole(n)) for i, (n, _) in enumerate(parts)]
    return Matrix(Scope(BF16, torch.device(device), formats), rows, Span.whole(k))


def _packed(blocks: list[Tensor], parts: Parts, k: int, in_order: bool) -> Weight:
    """The matrix as a model has it."""
    matrix = _matrix(parts, k, str(blocks[0].device))
    for i, each in enumerate(blocks):
        matrix.stored[i, "blocks"] = each
    with mock.patch.object(block_linear, "CHOICE", dataclasses.replace(CHOICE, block_order=in_order)):
        matrix.format.pack(matrix)
    return matrix.uncompressed


def _calls(
    checks: Checks, operation: str, weight: Weight, counts: Sequence[int]
) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
    """x of each number of tokens, and the product."""
    n, k = len(weight), weight.shape[1] if isinstance(weight, Tensor) else weight.num_channels
    for count in counts:
        generator = torch.Generator(checks.device).manual_seed(count)
        x = torch.randn(count, k, generator=generator, device=checks.device).to(BF16)
        residual = torch.zeros(count, n, dtype=BF16, device=checks.device)  # the first call's; others add to it
        yield x, partial(_compute, operation, weight, x, torch.ones(k, dtype=BF16, device=checks.device), residual)


def _compute(operation: str, weight: Weight, x: Tensor, norm: Tensor, residual: Tensor) -> Tensor:
    operations = kernels if x.dtype == torch.bfloat16 else reference
    if operation == "norm":
        return operations.norm_linear(x, norm, 1e-6, weight)
    if operation == "gated":
        return operations.norm_gated(x, norm, 1e-6, weight)
    if operation == "add":
        return operations.linear_add(residual, x, weight)
    return operations.linear(x, weight)


def _check(
    checks: Checks, name: str, operation: str, exact: Tensor, x: Tensor, calls: dict[str, Callable[[], Tensor]],
    file_bytes: int,
) -> None:  # fmt: skip
    residual = torch.zeros(len(x), len(exact), dtype=torch.float64, device=exact.device)
    want = _compute(operation, exact, x.double(), torch.ones_like(x[0]).double(), residual)
    errors = {layout: relative_error(calls[layout](), want) for layout in ("new", "old")}
    said = [f"errors {errors['new']:.1e}, {errors['old']:.1e}"]
    if checks.device != "cpu":
        us = {layout: _microseconds(call) for layout, call in calls.items()}
        speed = file_bytes / us["new"] / 1e6
        others = ", ".join(f"{layout} {us[layout]:.1f}" for layout in ("old", "AWQ"))
        said.append(f"new {us['new']:.1f} us ({speed:.2f} TB/s of the file's bytes), {others}")
        if len(x) <= 16:
            for count in WARPS:
                with _with_warps(count):
                    said.append(f"{count} warps {_microseconds(calls['new'], block_small_batch_tokens=16):.1f}")
        else:
            whole = {"weight_only_tokens": 0, "weight_only_swiglu_tokens": 0, "block_gemm_tokens": 0}
            said.append(f"new, dequantised for cuBLAS {_microseconds(calls['new'], **whole):.1f}")
    checks.saw(name, errors["new"] <= 1.2e-2, ", ".join(said))


def _microseconds(call: Callable[[], Tensor], **choices: Any) -> float:
    """Return the time of a call in a CUDA graph, with other choices."""
    with unwritten_is_unknown(), mock.patch.object(block_linear, "CHOICE", dataclasses.replace(CHOICE, **choices)):
        return 1e3 * do_bench(captured(call), return_mode="median")


def _with_warps(warps: int) -> AbstractContextManager[object]:
    """Let the kernel for few tokens have so many warps."""

    def choose(units: int, num_tokens: int) -> block_small_batch.Config:
        kept = 2 if num_tokens == 1 else 1 if num_tokens <= 8 else 0
        return block_small_batch.Config(warps, -(-units // warps) <= kept)

    return mock.patch.object(block_small_batch, "_choose", choose)
