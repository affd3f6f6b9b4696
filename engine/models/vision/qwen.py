"""The image encoder of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5. Shapes as in `engine.models.vision.layers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.layers import Linear
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope
from engine.models.shard import Span
from engine.models.spec import Grid, VisionSpec
from engine.models.vision.layers import (
    EncodedImages,
    EncoderLayer,
    LayerForm,
    PatchEmbedding,
    VisionEncoder,
    form_norm,
    placed,
    rope_frequencies,
)

FORM = LayerForm(
    norms=("norm1", "norm2"), qkv=("attn.qkv",), out="attn.proj", up=("mlp.linear_fc1",), down="mlp.linear_fc2"
)
OLDER = replace(FORM, up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj", norm="rms")  # Qwen2.5-VL
OLDEST = replace(FORM, up=("mlp.fc1",), down="mlp.fc2")  # Qwen2-VL


class QwenEncoder(VisionEncoder):
    """A transformer with RoPE. Layers with windows see a part of an image."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__(spec)
        scope = scope / "visual"
        form = OLDEST if spec.kind == "qwen2" else OLDER if spec.is_older else FORM
        self.patch_embed = PatchEmbedding(spec, scope / "patch_embed" / "proj", bias=not spec.is_older, frames=2)
        self.positions = PositionGrid(spec, scope / "pos_embed") if spec.num_positions else None
        self.layers = nn.ModuleList(EncoderLayer(spec, form, scope / "blocks" / i) for i in range(spec.num_layers))
        self.merger = Merger(spec, form, out_size, scope / "merger", norm_first=True)
        self.deepstack_mergers = nn.ModuleList(
            Merger(spec, form, out_size, scope / "deepstack_merger_list" / i, norm_first=False)
            for i in range(len(spec.deepstack))
        )
        frequencies = rope_frequencies(spec.head_dim // 2, spec.theta, scope.device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    frequencies: Tensor  # [head_dim / 4]

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> EncodedImages:
        x = self.patch_embed(patches)
        lengths = [rows * columns for rows, columns in grids]
        at = torch.cat([placed(grid, self.spec.merge_size, x.device) for grid in grids])
        if self.positions is not None:
            x = x + torch.cat([self.positions(grid) for grid in grids])
        order, windows = None, lengths
        if self.spec.window:
            order, windows = window_order(grids, self.spec)
            x, at = (in_order(each, order, self.spec.merge_size**2) for each in (x, at))
        angles = (at.unsqueeze(-1) * self.frequencies).flatten(1)  # [N, head_dim / 2]
        turns, deepstack = (angles.cos(), angles.sin()), []
        for index, layer in self._computed():
            x = layer(x, turns, lengths if index in self.spec.full_layers else windows)
            if index in self.spec.deepstack:
                deepstack.append(self.deepstack_mergers[self.spec.deepstack.index(index)](x))
        embeddings = self.merger(x)
        if order is not None:
            embeddings = torch.empty_like(embeddings).index_copy_(0, order.to(x.device), embeddings)
        return EncodedImages(embeddings, deepstack)


def window_order(grids: Sequence[Grid], spec: VisionSpec) -> tuple[Tensor, list[int]]:
    """Return the order [T] int64 in which tokens of a window follow each other, and the patches of each window."""
    orders, lengths, begin = [], [], 0
    for grid in grids:
        rows, columns = (count // spec.merge_size for count in grid)
        index = torch.arange(rows * columns).view(rows, columns) + begin
        begin += rows * columns
        for band in index.split(spec.window):
            for window in band.split(spec.window, 1):
                orders.append(window.flatten())
                lengths.append(window.numel() * spec.merge_size**2)
    return torch.cat(orders), lengths


def in_order(x: Tensor, order: Tensor, size: int) -> Tensor:
    """Return x [N, n] with its blocks of `size` rows in another order."""
    return x.view(len(order), size, -1)[order.to(x.device)].flatten(0, 1)


class PositionGrid(CheckpointModule):
    """Learnt vectors of a square of positions, interpolated between its points for images of any grid."""

    def __init__(self, spec: VisionSpec, scope: Scope) -> None:
        super().__init__()
        self.side, self._name = round(spec.num_positions**0.5), scope.name("weight")
        self._merge_size = spec.merge_size
        self.weight = scope.empty(spec.num_positions, spec.hidden_size)

    def forward(self, grid: Grid) -> Tensor:
        """Return the vectors [n, C] of the patches of an image, whose corners are those of the square."""
        found = torch.zeros(grid[0] * grid[1], self.weight.shape[1], device=self.weight.device)
        for index, share in neighbours(grid, self._merge_size, self.side, self.weight.device):
            found += self.weight[index] * share
        return found.to(self.weight.dtype)

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, tuple(map(Span.whole, self.weight.shape)), self.weight)


@lru_cache(maxsize=8)
def neighbours(grid: Grid, merge_size: int, side: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the four points [n] int64 of a square table around each patch of an image, and their weights [n, 1]."""
    at = placed(grid, merge_size, device)
    exact = at * torch.tensor([(side - 1) / max(count - 1, 1) for count in grid], device=device)
    low = exact.floor().long()
    high = (low + 1).clamp(max=side - 1)
    share = exact - low  # of the higher point
    return [
        (rows * side + columns, (row_share * column_share).unsqueeze(1))
        for rows, row_share in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0]))
        for columns, column_share in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1]))
    ]


class Merger(nn.Module):
    """Merges the patches of each block into a token of the text model: [N, C] → [T, out]."""

    def __init__(self, spec: VisionSpec, form: LayerForm, out_size: int, scope: Scope, *, norm_first: bool) -> None:
        """norm_first: normalise each patch before the merge; else each token after it."""
        super().__init__()
        self.size, self._norm_first = spec.hidden_size * spec.merge_size**2, norm_first
        norm, inner, outer = ("ln_q", "mlp.0", "mlp.2") if spec.is_older else ("norm", "linear_fc1", "linear_fc2")
        self.norm = form_norm(form, scope / norm, spec.hidden_size if norm_first else self.size)
        self.inner = Linear(scope, self.size, {inner: self.size}, bias=True)
        self.outer = Linear(scope, self.size, {outer: out_size}, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).view(-1, self.size) if self._norm_first else self.norm(x.view(-1, self.size))
        return self.outer.run(F.gelu(self.inner.run(x)))
