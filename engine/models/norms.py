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


class UnitRMSNorm(RMSNorm):
    """x / rms(x): its weights are 1 and not stored."""

    def __init__(self, scope: Scope, size: int | Span, eps: float) -> None:
        super().__init__(scope, size, eps)
        with torch.no_grad():
            self.weight.fill_(1)

    def tensors(self) -> Iterator[CheckpointTensor]:
        return iter(())


class PlainLayerNorm(Norm):
    """(x - mean(x)) / std(x), without weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps)

    def tensors(self) -> Iterator[CheckpointTensor]:
        return iter(())


class NoNorm(Norm):
    """x itself, of models without this norm."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def tensors(self) -> Iterator[CheckpointTensor]:
        return iter(())


class HeadNorms(Norm):
    """A LayerNorm of each head, with weights of its own: x [T, H, D]."""

    def __init__(self, scope: Scope, heads: Span, head_dim: int, eps: float, *, separate: bool) -> None:
        """heads: this rank's. separate: each has a tensor of its own."""
        super().__init__(scope, len(heads) * head_dim, eps)
        self._heads, self._head_dim = heads, head_dim
        self._separate = [scope.name(f"norms.{head}.weight") for head in range(heads.total)] if separate else []

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        normed = F.layer_norm(wide, x.shape[-1:], eps=self.eps) * self.weight.view(-1, self._head_dim)
        return normed.to(x.dtype)

    def tensors(self) -> Iterator[CheckpointTensor]:
        memory = self.weight.view(-1, self._head_dim)
        if not self._separate:
            yield CheckpointTensor(self._name, (self._heads, Span.whole(self._head_dim)), memory)
        for head, name in enumerate(self._separate):  # a head of another rank fills no memory
            row, columns = head - self._heads.start, Span.whole(self._head_dim)
            is_own = 0 <= row < len(self._heads)
            yield CheckpointTensor(
                name, (columns if is_own else columns.nothing(),), memory[row] if is_own else memory[0][:0]
            )


MakeNorm: TypeAlias = Callable[[Scope, int | Span], Norm]  # creates a model's norms of a size


def unweighted(make_norm: MakeNorm) -> MakeNorm:
    """Return a function that creates RMSNorms like those of `make_norm`, without weights."""
    return lambda scope, size: UnitRMSNorm(scope, size, make_norm(scope, 1).eps)
