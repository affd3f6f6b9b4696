"""The image encoder of Gemma 4. Shapes as in `engine.models.vision.layers`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from engine.models.layers import Linear
from engine.models.matrix import Scope
from engine.models.norms import RMSNorm, UnitRMSNorm
from engine.models.spec import Grid, VisionSpec
from engine.models.vision.layers import (
    EncodedImages,
    Turns,
    Vector,
    VisionEncoder,
    gated,
    mixed,
    patch_positions,
    rope_frequencies,
)


class Gemma4Encoder(VisionEncoder):
    """A transformer with RoPE and learnt vectors of rows and columns. The mean of a block becomes a token."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__(spec)
        tower, size = scope / "vision_tower", spec.hidden_size
        self.patch_embed = Vector(tower, "patch_embedder.input_proj.weight", size, 3 * spec.patch_size**2)
        self.positions = Vector(tower, "patch_embedder.position_embedding_table", 2, spec.num_positions, size)
        layers = tower / "encoder" / "layers"
        self.layers = nn.ModuleList(Gemma4Layer(spec, layers / i) for i in range(spec.num_layers))
        standard = ("std_bias", "std_scale") if spec.is_standardised else ()
        self.standard = nn.ModuleList(Vector(tower, name, size) for name in standard)
        self.norm = UnitRMSNorm(scope / "embed_vision" / "embedding_pre_projection_norm", size, spec.eps)
        self.projection = Linear(scope / "embed_vision", size, {"embedding_projection": out_size})
        frequencies = rope_frequencies(spec.head_dim // 2, spec.theta, scope.device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    frequencies: Tensor  # [head_dim / 4]

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> EncodedImages:
        weight, table = self.patch_embed.weight, self.positions.weight
        pixels = patches.permute(0, 2, 3, 1).flatten(1).float() / 255
        at = torch.cat([patch_positions(grid, self.spec.merge_size) for grid in grids]).to(patches.device)
        x = F.linear((2 * (pixels - 0.5)).to(weight.dtype), weight) + (table[0][at[:, 1]] + table[1][at[:, 0]])
        angles = at.flip(1).unsqueeze(-1) * self.frequencies  # [N, 2, head_dim / 4]: by column, then by row
        turns, lengths = (angles.cos(), angles.sin()), [rows * columns for rows, columns in grids]
        for _, layer in self._computed():
            x = layer(x, turns, lengths)
        means = x.float().unflatten(0, (-1, self.spec.merge_size**2)).mean(1).to(x.dtype)
        tokens = means.float() * math.sqrt(self.spec.hidden_size)
        if self.standard:
            bias, scale = (each.weight.float() for each in _vectors(self.standard))
            tokens = (tokens - bias) * scale
        return EncodedImages(self.projection.run(self.norm(tokens.to(x.dtype))))


def _vectors(modules: Iterable[nn.Module]) -> list[Vector]:
    return [each for each in modules if isinstance(each, Vector)]


class Gemma4Layer(nn.Module):
    """Attention among the patches of each image, then a gated MLP; norms before and behind both."""

    def __init__(self, spec: VisionSpec, scope: Scope) -> None:
        super().__init__()
        size, inner, self.spec = spec.hidden_size, spec.intermediate_size, spec
        width, attention, mlp = spec.num_heads * spec.head_dim, scope / "self_attn", scope / "mlp"
        names = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        self.norms = nn.ModuleList(RMSNorm(scope / name, size, spec.eps) for name in names)
        self.q, self.k, self.v = (ClippedLinear(spec, attention / f"{name}_proj", size, width) for name in "qkv")
        self.out = ClippedLinear(spec, attention / "o_proj", width, size)
        self.gate, self.up = (ClippedLinear(spec, mlp / name, size, inner) for name in ("gate_proj", "up_proj"))
        self.down = ClippedLinear(spec, mlp / "down_proj", inner, size)
        self.q_norm, self.k_norm = (RMSNorm(attention / f"{name}_norm", spec.head_dim, spec.eps) for name in "qk")
        self.v_norm = UnitRMSNorm(attention / "v_norm", spec.head_dim, spec.eps)

    def forward(self, x: Tensor, turns: Turns, lengths: Sequence[int]) -> Tensor:
        """x [N, C]; turns [N, 2, head_dim / 4] each: of the first half of a head and of the second."""
        before, behind, before_mlp, behind_mlp = self.norms
        normed = before(x)
        q, k, v = (
            norm(linear(normed).unflatten(1, (self.spec.num_heads, -1)))
            for linear, norm in ((self.q, self.q_norm), (self.k, self.k_norm), (self.v, self.v_norm))
        )
        q, k = (self._rotated(each, turns) for each in (q, k))
        x = x + behind(self.out(mixed(q, k, v, lengths, scale=1.0)))
        normed = before_mlp(x)
        inner = gated(torch.cat([self.gate(normed), self.up(normed)], 1), self.spec.activation)
        found: Tensor = x + behind_mlp(self.down(inner))
        return found

    @staticmethod
    def _rotated(x: Tensor, turns: Turns) -> Tensor:
        halves, (cos, sin) = x.chunk(2, -1), turns
        return torch.cat([kernels.rotate_halves(half, cos[:, i], sin[:, i]) for i, half in enumerate(halves)], -1)


class ClippedLinear(nn.Module):
    """A linear layer whose input and output are limited, if the checkpoint says to which numbers."""

    def __init__(self, spec: VisionSpec, scope: Scope, size: int, out_size: int) -> None:
        super().__init__()
        self.linear = Linear(scope, size, {"linear": out_size})
        names = ("input_min", "input_max", "output_min", "output_max") if spec.clips else ()
        self.limits = nn.ModuleList(Vector(scope, name) for name in names)

    def forward(self, x: Tensor) -> Tensor:
        if not self.limits:
            return self.linear.run(x)
        low, high, out_low, out_high = (each.weight for each in _vectors(self.limits))
        return self.linear.run(x.clamp(low, high)).clamp(out_low, out_high)
