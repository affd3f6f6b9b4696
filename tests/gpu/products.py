"""Checks of the products of small batches, alone and fused, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

import kernels
from kernels import reference
from kernels.triton.norm import MAX_HIDDEN
from tests.gpu.checks import BF16, LIMITS, Checks, relative_error

SIZES = (
    (1, 4096, 1024), (2, 3072, 4096), (1, 1000, 1000), (7, 1024, 3072), (16, 1024, 3072), (3, 4096, 1024),
    (13, 4096, 1024),
    (8, 1024, 2048), (12, 1024, 2048), (1, 3072, 1024), (16, 3072, 1024), (6, 6144, 4096), (8, 14336, 4096),
    (8, 4096, 14336), (5, 4096, 4096), (11, 1000, 192), (4, 40_000, 256), (300, 4096, 1024),
    (17, 3072, 4096), (64, 4096, 2048), (65, 14336, 4096), (128, 4096, 7168), (200, 5120, 2048), (256, 2048, 4096),
    (1, 15360, 3840), (8, 15360, 3840),
)  # fmt: skip
FORMS = ("linear", "linear_add", "linear_add_norm", "linear_gated", "norm_linear", "norm_gated", "norm_gated, gelu")


def check_products(checks: Checks, sizes: Sequence[tuple[int, int, int]] = SIZES) -> None:
    """The forms of a linear layer. `sizes`: (number of tokens, output channels, input channels)."""
    random = checks.random
    for num_tokens, n, k in sizes:
        names = {form: f"{form} {num_tokens} x {k} -> {n}" for form in FORMS}
        if not any(map(checks.wants, names.values())):
            continue
        x, weight, wide, norm, bias = random(num_tokens, k), random(n, k), random(2 * n, k), random(k), random(n)
        residual = random(num_tokens, n)
        next_norm = kernels.NextNorm(random(n), 1e-6)
        calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "linear": (kernels.linear, (x, weight, bias)),
            "linear_add": (kernels.linear_add, (residual, x, weight)),
            "linear_gated": (kernels.linear_gated, (x, wide)),
            "norm_linear": (kernels.norm_linear, (x, norm, 1e-6, weight, bias)),
            "norm_gated": (kernels.norm_gated, (x, norm, 1e-6, wide)),
            "norm_gated, gelu": (kernels.norm_gated, (x, norm, 1e-6, wide, None, "gelu_tanh")),
        }
        if n <= MAX_HIDDEN:
            calls["linear_add_norm"] = kernels.linear_add_norm, (residual, x, weight, bias, next_norm)
        for form, (call, arguments) in calls.items():
            want = getattr(reference, form.split(",")[0])(*map(_exact, arguments))
            limit = LIMITS[BF16] * (2 if "gated" in form else 1)  # it rounds the norm, two products and theirs
            checks.add(names[form], relative_error(call(*arguments), want), limit)


def _exact(argument: Any) -> Any:
    if isinstance(argument, kernels.NextNorm):
        return kernels.NextNorm(argument.weight.double(), argument.eps)
    return argument.double() if isinstance(argument, Tensor) else argument
