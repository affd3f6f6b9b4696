"""Operations that a linear layer needs before and after its GEMM, in one kernel where there is one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.data.activation import Gate


class Fusion(NamedTuple):
    """Prologue and epilogue of a GEMM: the norm of x before it; after it and its bias the gate, then the sum."""

    norm_weight: Tensor | None = None  # [K]; None: x is multiplied as it is
    eps: float = 0.0
    gate: Gate | None = None  # the weight has gate rows, then as many up rows
    residual: Tensor | None = None  # [M, N], to which the result is added
    out: Tensor | None = None  # [M, N], where the result goes

    def num_outputs(self, rows: int) -> int:
        """Return N of a weight of that many rows."""
        return rows if self.gate is None else rows // 2

    def into(self, x: Tensor, rows: int) -> Tensor:
        """Return the memory [M, N] that a kernel which fuses all of this writes, for a weight of that many rows."""
        into = self.out if self.residual is None else self.residual
        return x.new_empty(len(x), self.num_outputs(rows)) if into is None else into


NOTHING = Fusion()
