"""Unquantised weights: bfloat16, float16 or float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import kernels
from engine.models.layers import CheckpointTensor, Linear, RMSNorm, WeightFormat, empty


class FloatFormat(WeightFormat):
    """`weight` [out, in] in the model's dtype, in every product fused with what stands before or after it."""

    def create(self, linear: Linear, dtype: torch.dtype, device: torch.device) -> None:
        linear.weight = empty(linear.num_rows, len(linear.columns), dtype=dtype, device=device)

    def tensors(self, linear: Linear) -> Iterator[CheckpointTensor]:
        return linear.stacked("weight", linear.columns)

    def pack(self, linear: Linear) -> None:
        linear.weight = nn.Parameter(kernels.pack_weight(linear.weight), requires_grad=False)

    def product(self, linear: Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
        result = kernels.linear(x, linear.weight, linear.bias)
        return result if out is None else out.copy_(result)

    def after_norm(self, linear: Linear, x: Tensor, norm: RMSNorm, out: Tensor | None = None) -> Tensor:
        return kernels.norm_linear(x, norm.weight, norm.eps, linear.weight, linear.bias, out)

    def swiglu_after_norm(self, linear: Linear, x: Tensor, norm: RMSNorm) -> Tensor:
        return kernels.norm_swiglu(x, norm.weight, norm.eps, linear.weight, linear.bias)

    def add_to(self, linear: Linear, residual: Tensor, x: Tensor) -> Tensor:
        return kernels.linear_add(residual, x, linear.weight, linear.bias)


FLOATS = FloatFormat()
