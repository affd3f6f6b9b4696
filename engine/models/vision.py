"""The image encoder of Qwen2.5-VL, Qwen3-VL and Qwen3.5.

Shapes: N patches of all images of a call, in blocks of `merge_size` x `merge_size`; T = N / merge_size² tokens; C the
encoder's hidden size, P pixels of a patch's side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from engine.models.layers import Linear
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope
from engine.models.norms import LayerNorm, Norm, RMSNorm
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
        self.positions = PositionGrid(spec, scope / "pos_embed") if spec.num_positions else None
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
        if self.positions is not None:
            of_images = zip(grids, at.split(lengths), strict=True)
            x = x + torch.cat([self.positions(grid, one) for grid, one in of_images])
        order, windows = None, lengths
        if self.spec.window:
            order, windows = window_order(grids, self.spec)
            x, at = (in_order(each, order, self.spec.merge_size**2) for each in (x, at))
        angles = (at.unsqueeze(-1) * self.frequencies).flatten(1)  # [N, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        deepstack = []
        for index, layer in enumerate(self.layers):
            if index and self._skips:
                continue
            x = layer(x, cos, sin, lengths if index in self.spec.full_layers else windows)
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
        self.bias = None if spec.is_older else scope.empty(spec.hidden_size)
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
        if self.bias is not None:
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
        self.norm1, self.norm2 = (encoder_norm(spec, scope / name, size) for name in ("norm1", "norm2"))
        self.qkv = Linear(scope / "attn", size, {"qkv": 3 * size}, bias=True)
        self.proj = Linear(scope / "attn", size, {"proj": size}, bias=True)
        inner, mlp = spec.intermediate_size, scope / "mlp"
        up = {"gate_proj": inner, "up_proj": inner} if spec.is_older else {"linear_fc1": inner}
        self.up = Linear(mlp, size, up, bias=True)
        self.down = Linear(mlp, inner, {"down_proj" if spec.is_older else "linear_fc2": size}, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        """x [N, C]; cos, sin [N, head_dim / 2] float32; lengths: of groups of patches that see each other."""
        qkv = self.qkv.run(self.norm1(x)).view(len(x), 3, self.spec.num_heads, -1)
        q, k = rotated(qkv[:, :2], cos, sin).permute(1, 2, 0, 3)
        v = qkv[:, 2].transpose(0, 1)
        mixed, begin = [], 0
        for length, same in groupby(lengths):  # groups of one size beside each other at once
            stop = begin + length * len(list(same))
            query, key, value = (each[:, begin:stop].unflatten(1, (-1, length)).transpose(0, 1) for each in (q, k, v))
            found = F.scaled_dot_product_attention(query, key, value)
            mixed.append(found.transpose(1, 2).reshape(stop - begin, -1))
            begin = stop
        x = x + self.proj.run(torch.cat(mixed))
        inner = self.up.run(self.norm2(x))
        if self.spec.is_older:
            return x + self.down.run(kernels.gate_and_mul(inner, "silu"))
        return x + self.down.run(kernels.activation(inner, self.spec.activation))


def encoder_norm(spec: VisionSpec, scope: Scope, size: int) -> Norm:
    return RMSNorm(scope, size, EPS) if spec.is_older else LayerNorm(scope, size, EPS, bias=True)


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
        norm, inner, outer = ("ln_q", "mlp.0", "mlp.2") if spec.is_older else ("norm", "linear_fc1", "linear_fc2")
        self.norm = encoder_norm(spec, scope / norm, spec.hidden_size if norm_first else self.size)
        self.inner = Linear(scope, self.size, {inner: self.size}, bias=True)
        self.outer = Linear(scope, self.size, {outer: out_size}, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).view(-1, self.size) if self._norm_first else self.norm(x.view(-1, self.size))
        return self.outer.run(F.gelu(self.inner.run(x)))
