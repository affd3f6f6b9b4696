"""Checks of GEMMs with low-bit matrices, at the shapes of Llama-3.1-8B, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import kernels
from kernels import Weight, reference
from kernels.cuda import quantized_linear
from tests.gpu.checks import BF16, Checks, relative_error
from tests.oracles.random_weights import FORMS, random_weight

Call = Callable[[], Tensor]
NUM_TOKENS = (1, 8, 17, 64, 100, 180, 250, 333, 2048)
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LIMITS = {"e4m3": 0.05, "int8": 0.02}  # where x is rounded as well; elsewhere that of bfloat16


def check_formats(
    checks: Checks, num_tokens: Sequence[int] = NUM_TOKENS, shapes: dict[str, tuple[int, int]] = SHAPES
) -> None:
    """Each as a layer calls it: q, k and v after the norm, o and down with the residual sum, gate and up with
    SwiGLU.
    """
    cases = [(form, name) for form in ("bfloat16", *FORMS) for name in shapes]
    wanted = [case for case in cases if any(checks.wants(_name(*case, t)) for t in num_tokens)]
    if checks.device != "cpu":
        with kernels.compiling_only():
            for form, name in wanted:
                for _, call, _ in _calls(checks, form, name, *shapes[name], num_tokens):
                    call()
    for form, name in wanted:
        n, k = shapes[name]
        for x, call, weight in _calls(checks, form, name, n, k, num_tokens):
            exact = _exact(weight)
            want = _compute(name, exact, x.double(), torch.ones_like(x[0]).double(), torch.zeros(len(x), n).to(exact))
            rounded = not isinstance(weight, Tensor) and quantized_linear.quantizes(x, weight)
            limit = LIMITS[weight.kind] if rounded and not isinstance(weight, Tensor) else 6e-3
            num_bytes = weight.nbytes + x.nbytes + want.numel() * 2
            checks.add(_name(form, name, len(x)), relative_error(call(), want), 2 * limit, call, num_bytes)


def _name(form: str, name: str, num_tokens: int) -> str:
    return f"{form}: {name}, {num_tokens} tokens"


def _calls(
    checks: Checks, form: str, name: str, n: int, k: int, num_tokens: Sequence[int]
) -> Iterator[tuple[Tensor, Call, Weight]]:
    """x, the product, and its weight."""
    weight: Weight
    if form == "bfloat16":
        weight = checks.random(n, k) * k**-0.5
    else:
        weight = random_weight(form, n, k, checks.device)
    for count in num_tokens:
        if checks.wants(_name(form, name, count)):
            x, norm = checks.random(count, k), torch.ones(k, dtype=BF16, device=checks.device)
            residual = torch.zeros(count, n, dtype=BF16, device=checks.device)  # the first call's; others add to it
            yield x, partial(_compute, name, weight, x, norm, residual), weight


def _compute(name: str, weight: Weight, x: Tensor, norm: Tensor, residual: Tensor) -> Tensor:
    operations = kernels if x.dtype == torch.bfloat16 else reference
    if name == "qkv":
        return operations.norm_linear(x, norm, 1e-6, weight)
    if name == "gate_up":
        return operations.norm_gated(x, norm, 1e-6, weight)
    return operations.linear_add(residual, x, weight)


def _exact(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.double()
    return reference.dequantize(weight.codes, weight, torch.float64)
