"""RMSNorm, alone, of a residual sum, and before one."""

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


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., n], weight [n] -> (rms_norm(residual + x), residual + x), the sum rounded to x's dtype."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def rms_norm_add(residual: Tensor, x: Tensor, weight: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """residual [..., n] += factor · rms_norm(x [..., n], weight [n], eps), in place; the norm is rounded, then the sum."""
    return add_scaled(residual, rms_norm(x, weight, eps), factor)
