"""Learnt biases of attention's scores by the distance of query and key (T5, MPNet)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.models.errors import ModelError
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope
from engine.models.shard import Span

BUCKETS, REACH = 32, 128  # distances of `REACH` and more are in the last bucket


class RelativeBias(CheckpointModule):
    """Biases of each head in buckets of distances, shared by all layers. Ranks have those of their heads."""

    buckets: Tensor

    def __init__(self, num_heads: int, scope: Scope) -> None:
        super().__init__()
        if scope.device.type not in ("cpu", "meta"):
            raise ModelError("biases of scores by distance (MPNet) are supported on CPUs alone")
        self._heads = scope.shard.span("num_attention_heads", num_heads)
        self.weight, self._name = scope.empty(BUCKETS, len(self._heads)), scope.name("weight")
        self.register_buffer("buckets", _buckets(), persistent=False)  # [2 REACH + 1] int64

    def forward(self) -> Tensor:
        """Return `AttentionArgs.distance_bias`: [H, 2 REACH + 1] float32."""
        return self.weight[self.buckets].T.float()

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, (Span.whole(BUCKETS), self._heads), self.weight)


def _buckets() -> Tensor:
    """Return the bucket of each distance, the key's position less the query's, from -REACH to REACH.

    Half of the buckets are for later keys. Half of these are for one distance each; the others grow exponentially.
    """
    distance = torch.arange(-REACH, REACH + 1)
    half, exact = BUCKETS // 2, BUCKETS // 4
    size = distance.abs()
    grown = torch.log(size.clamp(min=1).float() / exact) / math.log(REACH / exact) * (half - exact)
    bucket = torch.where(size < exact, size, (exact + grown.long()).clamp(max=half - 1))
    return bucket + half * (distance > 0)
