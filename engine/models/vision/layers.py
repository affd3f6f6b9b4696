"""Parts that encoders of images share.

Shapes: N patches of all images of a call, in blocks of `merge_size` x `merge_size`; T = N / merge_size² tokens; C the
encoder's hidden size, P pixels of a patch's side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from engine.models.layers import Linear
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope
from engine.models.norms import LayerNorm, Norm, RMSNorm
from engine.models.shard import Span
from engine.models.spec import Grid, VisionSpec

Turns = tuple[Tensor, Tensor]  # cos and sin [N, head_dim / 2] float32


def rope_frequencies(num_channels: int, theta: float, device: torch.device) -> Tensor:
    """Return the angles [num_channels / 2] float32 by which RoPE turns pairs of channels per row, or per column."""
    exponents = torch.arange(0, num_channels, 2, dtype=torch.float32) / num_channels
    return 1.0 / theta ** exponents.to(device)


class EncodedImages(NamedTuple):
    """T tokens of images, encoded for the text model."""

    embeddings: Tensor  # [T, hidden]
    deepstack: Sequence[Tensor] = ()  # [T, hidden] each: added after the text model's first layers


class VisionEncoder(nn.Module):
    """Turns patches into embeddings of the text model. Each rank has the whole encoder."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.spec = spec
        self._skips = False  # all layers but the first

    layers: nn.ModuleList

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> EncodedImages:
        """Encode patches [N, 3, P, P] uint8 of images with these grids."""
        raise NotImplementedError

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Within the context, compute one layer: the others need no memory beside it."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def _computed(self) -> Iterator[tuple[int, nn.Module]]:
        """Return the layers that are computed, with their indexes."""
        return ((index, layer) for index, layer in enumerate(self.layers) if not (index and self._skips))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """The parts of an encoder's layers, and their names in a checkpoint."""

    norms: tuple[str, str]  # before attention and before the MLP
    qkv: tuple[str, ...]  # one matrix, or three
    out: str
    up: tuple[str, ...]  # two: the first is the gate of the second
    down: str
    norm: Literal["rms", "layer"] = "layer"
    eps: float = 1e-6  # of norms
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    scales: tuple[str, ...] = ()  # vectors [C] by which the results of attention and MLP are multiplied
    qk_norms: tuple[str, ...] = ()  # RMSNorms of queries and keys
    norms_heads: bool = False  # these are over each head, instead of over all
    turns_neighbours: bool = False  # RoPE turns channel 2i with 2i + 1, instead of i with i + head_dim / 2


def form_norm(form: LayerForm, scope: Scope, size: int) -> Norm:
    """Return a norm as the layers have."""
    return RMSNorm(scope, size, form.eps) if form.norm == "rms" else LayerNorm(scope, size, form.eps, bias=True)


class EncoderLayer(nn.Module):
    """Attention among the patches of each image, then an MLP."""

    def __init__(self, spec: VisionSpec, form: LayerForm, scope: Scope) -> None:
        super().__init__()
        size, inner, self.spec = spec.hidden_size, spec.intermediate_size, spec
        self.norm1, self.norm2 = (form_norm(form, scope / name, size) for name in form.norms)
        self.qkv = Linear(scope, size, dict.fromkeys(form.qkv, 3 * size // len(form.qkv)), bias=form.qkv_bias)
        self.proj = Linear(scope, size, {form.out: size}, bias=form.out_bias)
        self.up = Linear(scope, size, dict.fromkeys(form.up, inner), bias=form.mlp_bias)
        self.down = Linear(scope, inner, {form.down: size}, bias=form.mlp_bias)
        self._is_gated, self._turns_neighbours = len(form.up) == 2, form.turns_neighbours
        self._norms_heads = form.norms_heads
        width = spec.head_dim if form.norms_heads else size
        norms = [RMSNorm(scope / name, width, form.eps) for name in form.qk_norms]
        scales = [Vector(scope, name, size) for name in form.scales]
        self.qk_norms, self.scales = nn.ModuleList(norms), nn.ModuleList(scales)

    def forward(self, x: Tensor, turns: Turns | None, lengths: Sequence[int]) -> Tensor:
        """x [N, C]; turns: of RoPE, None: there is none; lengths: of groups of patches that see each other."""
        found = self.proj.run(self._attention(self.qkv.run(self.norm1(x)), turns, lengths))
        x = x + self._scaled(found, 0)
        inner, kind = self.up.run(self.norm2(x)), self.spec.activation
        inner = gated(inner, kind) if self._is_gated else self._activated(inner)
        found = self.down.run(inner)
        return x + self._scaled(found, 1)

    def _activated(self, inner: Tensor) -> Tensor:
        if (steepness := self.spec.steepness) == 1.0:
            return kernels.activation(inner, self.spec.activation)
        return kernels.activation(inner * steepness, self.spec.activation) / steepness

    def _scaled(self, found: Tensor, index: int) -> Tensor:
        """Scale the result of attention (0) or of the MLP (1)."""
        return found * cast(Vector, self.scales[index]).weight if self.scales else found

    def _attention(self, qkv: Tensor, turns: Turns | None, lengths: Sequence[int]) -> Tensor:
        query, key, value = qkv.chunk(3, 1)
        if self.qk_norms and not self._norms_heads:
            query, key = (norm(x) for norm, x in zip(self.qk_norms, (query, key), strict=True))
        q, k, v = (each.unflatten(1, (self.spec.num_heads, -1)) for each in (query, key, value))
        if self._norms_heads:
            q, k = (norm(x) for norm, x in zip(self.qk_norms, (q, k), strict=True))
        if self._turns_neighbours:  # scores stay the same in any order of channels
            q, k = (each.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for each in (q, k))
        if turns is not None:
            q, k = kernels.rotate_halves(q, *turns), kernels.rotate_halves(k, *turns)
        return mixed(q, k, v, lengths)


def gated(x: Tensor, kind: kernels.Activation) -> Tensor:
    """Return the activation of the first half of x [N, 2n] times the second: [N, n]."""
    if kind == "silu" or kind == "gelu_tanh":
        return kernels.gate_and_mul(x, kind)
    gate, up = x.chunk(2, 1)
    return kernels.activation(gate.contiguous(), kind) * up


def mixed(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float | None = None) -> Tensor:
    """Return the attention of q, k and v [N, heads, D] among groups of patches that see each other: [N, heads · D]."""
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    parts, begin = [], 0
    for length, same in groupby(lengths):  # groups of one size beside each other at once
        stop = begin + length * len(list(same))
        query, key, value = (each[:, begin:stop].unflatten(1, (-1, length)).transpose(0, 1) for each in (q, k, v))
        found = kernels.full_attention(query, key, value, scale)
        parts.append(found.transpose(1, 2).reshape(stop - begin, -1))
        begin = stop
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def patch_positions(grid: Grid, merge_size: int) -> Tensor:
    """Return the row and the column of each patch of an image, in the encoder's order: [rows · columns, 2] int64."""
    rows, columns = grid
    at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    blocks = at.view(rows // merge_size, merge_size, columns // merge_size, merge_size, 2)
    return blocks.transpose(1, 2).reshape(-1, 2)


@lru_cache(maxsize=8)
def placed(grid: Grid, merge_size: int, device: torch.device) -> Tensor:
    """Return `patch_positions` on a device. Most images of a server have few sizes."""
    return patch_positions(grid, merge_size).to(device)


class PatchEmbedding(CheckpointModule):
    """Normalises patches and projects them: [N, 3, P, P] uint8, or [2, N, 3, P, P] of two frames → [N, C].

    The frames of an image are the same, so the two parts of a projection of two frames are added. A second frame adds
    its difference from the first, as the second part projects it.
    """

    def __init__(self, spec: VisionSpec, scope: Scope, *, bias: bool, frames: int = 0) -> None:
        """frames: that the checkpoint's projection reads; 0: it has no such dimension."""
        super().__init__()
        side = spec.patch_size
        self._frames, self._shape = frames, (spec.hidden_size, 3, *[frames][: bool(frames)], side, side)
        self._name, self._bias_name = scope.name("weight"), scope.name("bias")
        # Of both frames together; and, where the model reads videos, of the second one.
        num_parts = 1 if spec.video_token_id is None else 2
        self.weight = scope.empty(num_parts, spec.hidden_size, 3 * side**2)
        self.bias = scope.empty(spec.hidden_size) if bias else None
        for name, values in (("mean", spec.mean), ("std", spec.std)):
            self.register_buffer(name, torch.tensor(values, device=scope.device).view(3, 1, 1), persistent=False)

    mean: Tensor  # [3, 1, 1] float32, as `std`
    std: Tensor

    def forward(self, patches: Tensor) -> Tensor:
        first = patches[0] if patches.ndim == 5 else patches
        x = ((first.float() / 255 - self.mean) / self.std).flatten(1)
        found = F.linear(x.to(self.weight.dtype), self.weight[0], self.bias)
        if patches.ndim == 5:
            change = ((patches[1].float() - first.float()) / 255 / self.std).flatten(1)
            found = found + F.linear(change.to(self.weight.dtype), self.weight[1])
        return found

    def tensors(self) -> Iterator[CheckpointTensor]:
        spans = tuple(map(Span.whole, self._shape))
        memory = self.weight if self._frames else self.weight.view(self._shape)
        yield CheckpointTensor(self._name, spans, memory, take=self._take if self._frames else None)
        if self.bias is not None:
            yield CheckpointTensor(self._bias_name, (Span.whole(self._shape[0]),), self.bias)

    def _take(self, stored: Tensor) -> None:
        self.weight[0].copy_(stored.float().sum(2).flatten(1))
        if len(self.weight) > 1:
            self.weight[1].copy_(stored[:, :, 1].flatten(1))


class Vector(CheckpointModule):
    """A vector or a table, in the shape in which the checkpoint stores it."""

    def __init__(self, scope: Scope, name: str, *shape: int) -> None:
        super().__init__()
        self._name, self.weight = scope.name(name), scope.empty(*shape)

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, tuple(map(Span.whole, self.weight.shape)), self.weight)
