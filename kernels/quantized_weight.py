"""Matrices of few bits, as all backends hold them: one form for every format of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

Kind: TypeAlias = Literal["e4m3", "int8", "int4", "e2m1"]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """W [N, K]: W[n, order[k]] = (value[n, k] - zero[n, k // group]) · scale[n // rows, k // group] · factor[n].

    `kind` says what a code's value is: e4m3 and int8, itself; int4, the code less 8; e2m1, ± 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
    """

    kind: Kind
    codes: (
        Tensor  # e4m3 and int8: [N, K]; else [N, K / 2] uint8: byte j holds channel j, and in its high bits j + K / 2
    )
    scale: Tensor  # [ceil(N / rows), ceil(K / group)] float32, float16, bfloat16 or e4m3
    group: int  # channels that share a scale
    rows: int = 1  # rows that share a scale
    zero: Tensor | None = None  # [N, ceil(K / group)] int8
    factor: Tensor | None = None  # [N] float32
    order: Tensor | None = None  # [K] int64: a permutation of the channels; None: as they are
    rounds_activations: bool = False  # products may round x to codes of this kind with a scale for each token

    @property
    def num_channels(self) -> int:
        return self.codes.shape[1] * (2 if self.kind in ("int4", "e2m1") else 1)

    @property
    def nbytes(self) -> int:
        """Of all that a product reads."""
        tensors = (self.codes, self.scale, self.zero, self.factor, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.codes)


Weight: TypeAlias = Tensor | QuantizedWeight
