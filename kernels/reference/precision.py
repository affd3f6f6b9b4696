"""The dtype that values are computed in: float32, or float64 for float64 inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums over x are made in."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def to_wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x))
