"""Matrices whose sums are divided into pieces of fixed borders, so that any number of ranks adds up the same."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.data.quantized_weight import Weight


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """W [N, K] as pieces of its columns, packed one by one."""

    pieces: tuple[Weight, ...]
    columns: tuple[slice, ...]  # of each piece
    bias: Tensor | None = None  # [N] float32, added to the first piece's sums
