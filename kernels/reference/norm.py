"""RMSNorm, alone and around the residual sum."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.activation import add_scaled
from kernels.reference.precision import to_wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n], weight [n] -> [..., n]: x / sqrt(mean(x²) + eps) rounded to x's dtype, then times weight."""
    wide = to_wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)


def rms_norm_add(residual: Tensor, x: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """residual [..., n] += factor · rms_norm(x [..., n], weight [n], eps), in place; the norm is rounded, then the
    sum.
    """
    return add_scaled(residual, rms_norm(x, weight, eps), factor)


def add_rms_norm(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    x_weight: Tensor | None = None,
    x_eps: float = 0.0,
    factor: float = 1.0,
) -> Tensor:
    """residual [..., n] += factor · x [..., n], in place -> rms_norm(residual, weight [n], eps).

    With `x_weight`, what is added is factor · rms_norm(x, x_weight [n], x_eps), as by `rms_norm_add`.
    """
    if x_weight is None:
        add_scaled(residual, x, factor)
    else:
        rms_norm_add(residual, x, x_weight, x_eps, factor)
    return rms_norm(residual, weight, eps)
