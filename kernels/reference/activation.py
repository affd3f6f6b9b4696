"""The gated activations of MLPs, and the multipliers and caps of some families."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from kernels.data.activation import Activation, Gate


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2n] -> [..., n]: silu of the first half, rounded to x's dtype, times the second half."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2n] -> [..., n]: gelu (by tanh) of the first half, rounded to x's dtype, times the second half."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gate_and_mul(x: Tensor, gate: Gate) -> Tensor:
    """x [..., 2n] -> [..., n]: `silu_and_mul` or `gelu_and_mul`."""
    return silu_and_mul(x) if gate == "silu" else gelu_and_mul(x)


def activation(x: Tensor, kind: Activation) -> Tensor:
    """Return the activation of x [T, n], of MLPs without a gate and of gates: "gelu_tanh" is GELU by tanh, "relu2"
    relu(x)².
    """
    if kind == "silu":
        return F.silu(x)
    if kind == "sigmoid":
        return x.sigmoid()
    if kind in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    return F.relu(x) if kind == "relu" else F.relu(x).square_()


def gated(x: Tensor, gate: Tensor, kind: Literal["silu", "sigmoid"], rounded: bool = False) -> Tensor:
    """Return x [T, n] · activation(gate [T, n]), computed in float32; x may be overwritten.

    rounded: the activation is computed in x's dtype.
    """
    if rounded:
        return x.mul_(activation(gate, kind))
    return (x * activation(gate.float(), kind)).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Return sigmoid of x, in place."""
    return x.sigmoid_()


def add_scaled(residual: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
    """residual [..., n] += factor · x [..., n], in place; the sum is rounded once."""
    return residual.add_(x, alpha=factor)


def scale(x: Tensor, factor: float = 1.0, cap: float = 0.0) -> Tensor:
    """x [..., n] *= factor, in place; with a cap, cap · tanh(that / cap)."""
    if factor != 1:
        x.mul_(factor)
    return x.div_(cap).tanh_().mul_(cap) if cap else x
