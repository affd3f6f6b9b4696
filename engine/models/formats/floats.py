"""Unquantised weights: bfloat16, float16 or float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.models.matrix import CheckpointTensor, Matrix, WeightFormat, by_rows, empty


class FloatFormat(WeightFormat):
    """`weight` [out, in] in the model's dtype."""

    def of(self, names: Sequence[str]) -> WeightFormat:
        return self

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device) -> None:
        matrix.weight = empty(*matrix.shape_of_rows(), len(matrix.columns), dtype=dtype, device=device)

    def tensors(self, matrix: Matrix) -> Iterator[CheckpointTensor]:
        return by_rows("weight", matrix.parts, _floats(matrix).flatten(0, -2), matrix.columns)

    def pack(self, matrix: Matrix) -> None:
        """Do nothing: the weight already has the form that GEMMs read."""


def _floats(matrix: Matrix) -> Tensor:
    assert isinstance(matrix.weight, Tensor)
    return matrix.weight


FLOATS = FloatFormat()
