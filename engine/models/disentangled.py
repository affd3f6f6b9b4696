"""DeBERTa's attention: scores also compare contents with relative positions, which each layer projects as it does
tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.attention import Attention, AttentionMetadata
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope
from engine.models.norms import LayerNorm
from engine.models.residual import ResidualEpilogue, ResidualStream, SublayerInput
from engine.models.shard import Span
from engine.models.spec import DisentangledSpec


class RelativeEmbeddings(CheckpointModule):
    """Learnt vectors of relative positions, shared by all layers. All ranks hold them whole."""

    def __init__(self, spec: DisentangledSpec, hidden_size: int, eps: float, scope: Scope) -> None:
        super().__init__()
        self.spec, self._name = spec, scope.name("weight")
        self.weight = scope.empty(2 * spec.span, hidden_size)
        self.norm: nn.Module | None = LayerNorm(scope / "norm", hidden_size, eps, bias=True) if spec.norm else None

    def forward(self, reach: int) -> tuple[Tensor, Tensor]:
        """Return the vectors [R, hidden] of the distances from -reach to reach, and the row of each [2 reach + 1]."""
        rows = buckets(self.spec, reach).to(self.weight.device)
        first, last = bucket_ends(self.spec, reach)
        vectors = self.weight[first : last + 1]
        return vectors if self.norm is None else self.norm(vectors), rows - first

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, tuple(map(Span.whole, self.weight.shape)), self.weight)


def buckets(spec: DisentangledSpec, reach: int) -> Tensor:
    """Return the row of each distance, the query's position less the key's, from -reach to reach: [2 reach + 1] int64.

    With buckets, half of the rows of each side are for one distance each; the others grow exponentially.
    """
    distance = torch.arange(-reach, reach + 1)
    if spec.num_buckets:
        exact, size = spec.num_buckets // 2, distance.abs().clamp(min=1).float()
        most = torch.tensor((spec.max_distance - 1) / exact).log()  # in float32, as in training
        grown = torch.log(size / exact) / most * (exact - 1)
        far = torch.ceil(grown).long() + exact
        distance = torch.where(distance.abs() <= exact, distance, far * distance.sign())
    return (distance + spec.span).clamp(0, 2 * spec.span - 1)


def bucket_ends(spec: DisentangledSpec, reach: int) -> tuple[int, int]:
    """Return the first and the last of `buckets`, which do not decrease."""
    found = buckets(spec, reach)
    return int(found[0]), int(found[-1])


class DisentangledAttention(Attention):
    """Attention of whole texts: of query i and key j the sum of q_i · k_j, q_i · K(i - j) and Q(i - j) · k_j, where K
    and Q are the keys and queries of relative positions. It caches nothing.
    """

    distances: RelativeEmbeddings  # the decoder's

    def forward(
        self,
        x: SublayerInput,
        epilogue: ResidualEpilogue,
        positions: Tensor,
        kv: Tensor,
        metadata: AttentionMetadata,
    ) -> ResidualStream:
        """Add the attention of x [T, hidden] to the residual stream in place, see `Attention.forward`."""
        ends = metadata.query_start.tolist()
        longest = max(end - start for start, end in itertools.pairwise(ends))
        reach = max(longest - 1, 0)  # steps at start-up may have no tokens in any text
        vectors, rows = self.distances(reach)
        query, key, value = self._heads_of(self.qkv.run(x))  # [H, T, D] each
        distance_query, distance_key, _ = self._heads_of(self.qkv.run(vectors))
        distance_query, distance_key = distance_query[:, rows], distance_key[:, rows.flip(0)]  # [H, 2 reach + 1, D]
        out = torch.zeros_like(query)
        for start, end in itertools.pairwise(ends):
            own, among = slice(start, end), slice(reach + 1 - (end - start), reach + end - start)
            if start < end:
                texts = query[:, own], key[:, own], value[:, own]
                out[:, own] = attend_by_distances(
                    *texts, distance_query[:, among], distance_key[:, among], self.spec.scale
                )
        mixed = out.transpose(0, 1).flatten(1)
        return self.o.run(metadata.select(mixed), epilogue.select(metadata.logits_indices))

    def _heads_of(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.unflatten(1, (3, self.spec.num_heads, self.spec.head_dim)).permute(1, 2, 0, 3).unbind(0)


def attend_by_distances(
    query: Tensor, key: Tensor, value: Tensor, distance_query: Tensor, distance_key: Tensor, scale: float
) -> Tensor:
    """Compute the attention of one text: query, key, value [H, n, D] → [H, n, D].

    distance_query [H, 2n - 1, D]: of the distances i - j from -(n - 1) to n - 1; distance_key: the same from n - 1 on.
    """
    by_key = _along_distances(query @ distance_key.transpose(1, 2))  # [H, i, j]
    by_query = _along_distances(key @ distance_query.transpose(1, 2))  # [H, j, i]
    bias = (by_key + by_query.transpose(1, 2)).mul_(scale)
    return F.scaled_dot_product_attention(query[None], key[None], value[None], bias[None], scale=scale)[0]


def _along_distances(scores: Tensor) -> Tensor:
    """Return entry a [H, n, n] of scores by distances [H, n, 2n - 1]: of row i and column j that at j - i + n - 1."""
    h, n, width = scores.shape
    return scores.contiguous().as_strided((h, n, n), (n * width, width - 1, 1), n - 1)
