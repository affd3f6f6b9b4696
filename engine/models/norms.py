"""Norms of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope, empty
from engine.models.shard import Span


class Norm(CheckpointModule):
    """A norm of x [..., n] times its stored weight plus `offset`."""

    def __init__(self, scope: Scope, size: int | Span, eps: float, offset: float = 0.0) -> None:
        """size: of x; a span: this rank's part of a divided dimension."""
        super().__init__()
        self.eps, self._name, self._offset = eps, scope.name("weight"), offset
        self._span = size if isinstance(size, Span) else Span.whole(size)
        dtype = torch.float32 if offset else scope.dtype  # so that weight + offset is exact
        self.weight = empty(len(self._span), dtype=dtype, device=scope.device)

    def tensors(self) -> Iterator[CheckpointTensor]:
        take = self._take if self._offset else None
        yield CheckpointTensor(self._name, (self._span,), self.weight, take=take)

    def _take(self, stored: Tensor) -> None:
        self.weight.copy_(stored.float() + self._offset)


class RMSNorm(Norm):
    """x / rms(x) · weight."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class LayerNorm(Norm):
    """(x - mean(x)) / std(x) · weight, plus an optional bias."""

    def __init__(self, scope: Scope, size: int | Span, eps: float, offset: float = 0.0, *, bias: bool = False) -> None:
        super().__init__(scope, size, eps, offset)
        self.bias = empty(len(self._span), dtype=self.weight.dtype, device=scope.device) if bias else None
        self._bias_name = scope.name("bias")

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        return F.layer_norm(wide, x.shape[-1:], self.weight, self.bias, self.eps).to(x.dtype)

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield from super().tensors()
        if self.bias is not None:
            yield CheckpointTensor(self._bias_name, (self._span,), self.bias)


MakeNorm: TypeAlias = Callable[[Scope, int | Span], Norm]  # creates a model's norms of a size
