"""The image encoder of Qwen3-VL and Qwen3.5.

Shapes: N patches of all images of a call, in blocks of `merge_size` x `merge_size`; T = N / merge_size² tokens; C the
encoder's hidden size, P pixels of a patch's side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from engine.models.layers import Linear
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope
from engine.models.norms import LayerNorm
from engine.models.shard import SINGLE, SingleRank, Span
from engine.models.spec import VisionSpec

EPS = 1e-6  # of norms
THETA = 10_000.0  # of the encoder's RoPE
Grid = tuple[int, int]  # rows and columns of patches


class EncodedImages(NamedTuple):
    """T tokens of images, encoded for the text model."""

    embeddings: Tensor  # [T, hidden]
    deepstack: list[Tensor]  # [T, hidden] each: added after the text model's first layers


class VisionEncoder(nn.Module):
    """Turns patches into embeddings of the text model. Each rank has the whole encoder."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__()
        scope = replace(scope, shard=SINGLE, communicator=SingleRank())
        self.spec, self.out_size, size = spec, out_size, spec.hidden_size
        self.patch_embed = PatchEmbedding(spec, scope / "patch_embed" / "proj")
        self.positions = PositionGrid(spec, scope / "pos_embed")
        self.layers = nn.ModuleList(EncoderLayer(spec, scope / "blocks" / i) for i in range(spec.num_layers))
        self.merger = Merger(spec, out_size, scope / "merger", norm_first=True)
        self.deepstack_mergers = nn.ModuleList(
            Merger(spec, out_size, scope / "deepstack_merger_list" / i, norm_first=False)
            for i in range(len(spec.deepstack))
        )
        exponents = torch.arange(0, spec.head_dim // 2, 2, dtype=torch.float32) / (spec.head_dim // 2)
        self.register_buffer("frequencies", 1.0 / THETA ** exponents.to(scope.device), persistent=False)
        assert size % spec.num_heads == 0
        self._skips = False  # all layers but the first

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Within the context, compute one layer: the others need no memory beside it."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    frequencies: Tensor  # [head_dim / 4]

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> EncodedImages:
        """Encode patches [N, 3, P, P] uint8 of images with these grids."""
        x = self.patch_embed(patches)
        lengths = [rows * columns for rows, columns in grids]
        at = torch.cat([patch_positions(grid, self.spec.merge_size) for grid in grids]).to(x.device)
        of_images = zip(grids, at.split(lengths), strict=True)
        x = x + torch.cat([self.positions(grid, one) for grid, one in of_images])
        angles = (at.unsqueeze(-1) * self.frequencies).flatten(1)  # [N, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        deepstack = []
        for index, layer in enumerate(self.layers):
            x = x if self._skips and index else layer(x, cos, sin, lengths)
            if index in self.spec.deepstack:
                deepstack.append(self.deepstack_mergers[self.spec.deepstack.index(index)](x))
        return EncodedImages(self.merger(x), deepstack)


def patch_positions(grid: Grid, merge_size: int) -> Tensor:
    """Return the row and the column of each patch of an image, in the encoder's order: [rows · columns, 2] int64."""
    rows, columns = grid
    at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    blocks = at.view(rows // merge_size, merge_size, columns // merge_size, merge_size, 2)
    return blocks.transpose(1, 2).reshape(-1, 2)


class PatchEmbedding(CheckpointModule):
    """Normalises patches and projects them: [N, 3, P, P] uint8 → [N, C].

    The checkpoint's projection reads two frames. Those of an image are the same, so its two halves are added.
    """

    def __init__(self, spec: VisionSpec, scope: Scope) -> None:
        super().__init__()
        self._shape = (spec.hidden_size, 3, 2, spec.patch_size, spec.patch_size)
        self._name, self._bias_name = scope.name("weight"), scope.name("bias")
        self.weight = scope.empty(spec.hidden_size, 3 * spec.patch_size**2)
        self.bias = scope.empty(spec.hidden_size)
        for name, values in (("mean", spec.mean), ("std", spec.std)):
            self.register_buffer(name, torch.tensor(values, device=scope.device).view(3, 1, 1), persistent=False)

    mean: Tensor  # [3, 1, 1] float32, as `std`
    std: Tensor

    def forward(self, patches: Tensor) -> Tensor:
        x = ((patches.float() / 255 - self.mean) / self.std).flatten(1)
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def tensors(self) -> Iterator[CheckpointTensor]:
        spans = tuple(map(Span.whole, self._shape))
        yield CheckpointTensor(self._name, spans, self.weight, take=self._take)
        yield CheckpointTensor(self._bias_name, (Span.whole(self._shape[0]),), self.bias)

    def _take(self, stored: Tensor) -> None:
        self.weight.copy_(stored.float().sum(2).flatten(1))


class PositionGrid(CheckpointModule):
    """Learnt vectors of a square of positions, interpolated between its points for images of any grid."""

    def __init__(self, spec: VisionSpec, scope: Scope) -> None:
        super().__init__()
        self.side, self._name = round(spec.num_positions**0.5), scope.name("weight")
        self.weight = scope.empty(spec.num_positions, spec.hidden_size)

    def forward(self, grid: Grid, at: Tensor) -> Tensor:
        """Return the vectors [n, C] of patches in the rows and columns `at` [n, 2] of an image, whose corners are those
        of the square.
        """
        spread = torch.tensor([(self.side - 1) / max(count - 1, 1) for count in grid], device=at.device)
        exact = at * spread
        low = exact.floor().long()
        high = (low + 1).clamp(max=self.side - 1)
        share = exact - low  # of the higher point
        found = torch.zeros(len(at), self.weight.shape[1], device=at.device)
        for rows, row_share in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
            for columns, column_share in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
                found += self.weight[rows * self.side + columns] * (row_share * column_share).unsqueeze(1)
        return found.to(self.weight.dtype)

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, tuple(map(Span.whole, self.weight.shape)), self.weight)


class EncoderLayer(nn.Module):
    """Attention among the patches of each image, then an MLP."""

    def __init__(self, spec: VisionSpec, scope: Scope) -> None:
        super().__init__()
        size, self.spec = spec.hidden_size, spec
        self.norm1 = LayerNorm(scope / "norm1", size, EPS, bias=True)
        self.norm2 = LayerNorm(scope / "norm2", size, EPS, bias=True)
        self.qkv = Linear(scope / "attn", size, {"qkv": 3 * size}, bias=True)
        self.proj = Linear(scope / "attn", size, {"proj": size}, bias=True)
        self.up = Linear(scope / "mlp", size, {"linear_fc1": spec.intermediate_size}, bias=True)
        self.down = Linear(scope / "mlp", spec.intermediate_size, {"linear_fc2": size}, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        """x [N, C]; cos, sin [N, head_dim / 2] float32; lengths: patches of each image."""
        qkv = self.qkv.run(self.norm1(x)).view(len(x), 3, self.spec.num_heads, -1)
        q, k = rotated(qkv[:, :2], cos, sin).permute(1, 2, 0, 3)
        v = qkv[:, 2].transpose(0, 1)
        images = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), strict=True)
        mixed = [F.scaled_dot_product_attention(*(part.unsqueeze(0) for part in each))[0] for each in images]
        x = x + self.proj.run(torch.cat(mixed, 1).transpose(0, 1).reshape(len(x), -1))
        return x + self.down.run(kernels.activation(self.up.run(self.norm2(x)), self.spec.activation))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [N, 2, heads, D] by angles whose cos and sin are [N, D / 2]: element i with element i + D / 2."""
    low, high = x.float().chunk(2, -1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


class Merger(nn.Module):
    """Merges the patches of each block into a token of the text model: [N, C] → [T, out]."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope, *, norm_first: bool) -> None:
        """norm_first: normalise each patch before the merge; else each token after it."""
        super().__init__()
        self.size, self._norm_first = spec.hidden_size * spec.merge_size**2, norm_first
        self.norm = LayerNorm(scope / "norm", spec.hidden_size if norm_first else self.size, EPS, bias=True)
        self.inner = Linear(scope, self.size, {"linear_fc1": self.size}, bias=True)
        self.outer = Linear(scope, self.size, {"linear_fc2": out_size}, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).view(-1, self.size) if self._norm_first else self.norm(x.view(-1, self.size))
        return self.outer.run(F.gelu(self.inner.run(x)))
