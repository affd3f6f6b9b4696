"""The gated activations of MLPs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2n] -> [..., n]: silu of the first half, rounded to x's dtype, times the second half."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2n] -> [..., n]: gelu (by tanh) of the first half, rounded to x's dtype, times the second half."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)
