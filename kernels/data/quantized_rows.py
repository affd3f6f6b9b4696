"""Quantised tokens, as GEMMs of codes take them. Needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """x [M, K] as one GEMM takes it: x[m, k] ≈ codes[m, k] · scale[m, k // group]."""

    codes: Tensor  # [M, K] or more rows, e4m3 or int8
    scale: Tensor  # [as many, ceil(K / group)] float32, of any strides
    group: int  # channels of a scale; 0: all
    num_rows: int  # M: nothing is written to the rows beyond it, which some GEMMs need
    dtype: torch.dtype  # of x, and of the result

    @classmethod
    def empty(cls, x: Tensor, dtype: torch.dtype, group: int = 0, by_group: bool = False) -> QuantizedRows:
        """Unwritten memory for x [M, K] rounded to `dtype`, with a scale for each group of channels; group 0: of all
        channels.

        by_group: a group's scales lie side by side in memory, and the number of rows is rounded up to a multiple of 4.
        """
        num_rows, k = x.shape
        rows = -(-num_rows // 4) * 4 if by_group else num_rows
        shape = (rows, -(-k // (group or k)))
        strides = (1, rows) if by_group else (shape[1], 1)
        codes = torch.empty(rows, k, dtype=dtype, device=x.device)
        scale = torch.empty_strided(shape, strides, dtype=torch.float32, device=x.device)
        return cls(codes, scale, group, num_rows, x.dtype)

    def __len__(self) -> int:
        return self.num_rows

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def is_cpu(self) -> bool:
        return self.codes.is_cpu

    @property
    def is_cuda(self) -> bool:
        return self.codes.is_cuda


@dataclass(frozen=True, slots=True)
class NextNorm:
    """The RMSNorm with which the next operation reads a sum: computed with the sum."""

    weight: Tensor  # [n]
    eps: float
    rounded: QuantizedRows | None = None  # memory for the norm of this sum, if it is to be rounded
