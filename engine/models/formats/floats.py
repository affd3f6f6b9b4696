"""Unquantised weights: bfloat16, float16 or float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

import kernels
from engine.models.layers import CheckpointTensor, Linear, WeightFormat, empty, stacked


class FloatFormat(WeightFormat):
    """`weight` [out, in] in the model's dtype."""

    def for_linear(self, names: Sequence[str]) -> WeightFormat:
        return self

    def create(self, linear: Linear, dtype: torch.dtype, device: torch.device) -> None:
        linear.weight = empty(linear.num_rows, len(linear.columns), dtype=dtype, device=device)

    def tensors(self, linear: Linear) -> Iterator[CheckpointTensor]:
        return stacked("weight", linear.parts, _floats(linear), linear.columns)

    def pack(self, linear: Linear) -> None:
        linear.weight = nn.Parameter(kernels.pack_weight(_floats(linear)), requires_grad=False)


def _floats(linear: Linear) -> Tensor:
    assert isinstance(linear.weight, Tensor)
    return linear.weight


FLOATS = FloatFormat()
