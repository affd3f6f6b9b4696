"""Layers between pooling and a request's output: classifiers of encoders, sentence-transformers' Dense modules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope, empty
from engine.models.norms import LayerNorm
from engine.models.shard import Span
from engine.models.spec import HeadLayerSpec, HeadSpec


class PoolingHead(nn.Module):
    """Computes outputs from pooled hidden states, in float32. All ranks hold it whole."""

    def __init__(self, spec: HeadSpec, hidden_size: int, eps: float, scope: Scope) -> None:
        super().__init__()
        self.num_outputs, sizes = spec.num_outputs, [hidden_size, *(layer.num_outputs for layer in spec.layers)]
        self.layers = nn.ModuleList(
            HeadLayer(layer, size, eps, scope) for layer, size in zip(spec.layers, sizes, strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [n, hidden] float32 → [n, outputs] float32."""
        for layer in self.layers:
            x = layer(x)
        return x


class HeadLayer(CheckpointModule):
    """A linear layer, its activation, and a norm."""

    def __init__(self, spec: HeadLayerSpec, num_inputs: int, eps: float, scope: Scope) -> None:
        super().__init__()
        self.spec = spec
        self.weight = empty(spec.num_outputs, num_inputs, dtype=torch.float32, device=scope.device)
        self.bias = empty(spec.num_outputs, dtype=torch.float32, device=scope.device) if spec.bias else None
        self.norm = LayerNorm(scope / spec.norm, spec.num_outputs, eps, bias=spec.norm_bias) if spec.norm else None
        self._name = scope.name(spec.name)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight, self.bias)
        if self.spec.activation:
            x = torch.tanh(x) if self.spec.activation == "tanh" else kernels.activation(x, self.spec.activation)
        return x if self.norm is None else self.norm(x)

    def tensors(self) -> Iterator[CheckpointTensor]:
        if not self.spec.folder:
            yield from self.own_tensors()

    def own_tensors(self) -> Iterator[CheckpointTensor]:
        """Return the layer's tensors, also if they are in a folder of their own."""
        for what, memory in (("weight", self.weight), ("bias", self.bias)):
            if memory is not None:
                yield CheckpointTensor(f"{self._name}.{what}", tuple(map(Span.whole, memory.shape)), memory)
