"""The image encoder of GLM-4.1V, 4.5V, 4.6V and GLM-OCR. Shapes as in `engine.models.vision.layers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from engine.models.layers import Linear
from engine.models.matrix import Scope
from engine.models.norms import LayerNorm, RMSNorm
from engine.models.spec import Grid, VisionSpec
from engine.models.vision.layers import (
    EncodedImages,
    EncoderLayer,
    LayerForm,
    PatchEmbedding,
    Vector,
    VisionEncoder,
    gated,
    patch_positions,
    rope_frequencies,
)

FORM = LayerForm(
    norms=("norm1", "norm2"),
    qkv=("attn.qkv",),
    out="attn.proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    norm="rms",
)


class GlmEncoder(VisionEncoder):
    """A transformer with RoPE, and but for GLM-OCR learnt vectors of positions, interpolated for images of any grid."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__(spec)
        scope, size = scope / "visual", spec.hidden_size
        self.patch_embed = PatchEmbedding(spec, scope / "patch_embed" / "proj", bias=True, frames=2)
        self.first_norm = self.positions = None
        if spec.num_positions:
            self.first_norm = RMSNorm(scope / "post_conv_layernorm", size, spec.eps)
            self.positions = Vector(scope, "embeddings.position_embedding.weight", spec.num_positions, size)
        form = replace(FORM, eps=spec.eps, qkv_bias=spec.qkv_bias, out_bias=spec.layer_bias, mlp_bias=spec.layer_bias)
        form = replace(form, qk_norms=("attn.q_norm", "attn.k_norm") if spec.qk_norm else (), norms_heads=spec.qk_norm)
        self.layers = nn.ModuleList(EncoderLayer(spec, form, scope / "blocks" / i) for i in range(spec.num_layers))
        self.last_norm = RMSNorm(scope / "post_layernorm", size, spec.eps)
        self.merge = Vector(scope, "downsample.weight", out_size, size, spec.merge_size, spec.merge_size)
        self.merge_bias = Vector(scope, "downsample.bias", out_size)
        self.merger = Merger(spec, out_size, scope / "merger")
        frequencies = rope_frequencies(spec.head_dim // 2, spec.theta, scope.device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    frequencies: Tensor  # [head_dim / 4]

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> EncodedImages:
        x, block = self.patch_embed(patches), self.spec.merge_size
        of_images = [patch_positions(grid, block).to(x.device) for grid in grids]
        if self.first_norm is not None:
            positions = [self._positions(grid, at) for grid, at in zip(grids, of_images, strict=True)]
            x = self.first_norm(x) + torch.cat(positions)
        angles = (torch.cat(of_images).unsqueeze(-1) * self.frequencies).flatten(1)  # [N, head_dim / 2]
        turns, lengths = (angles.cos(), angles.sin()), [rows * columns for rows, columns in grids]
        for _, layer in self._computed():
            x = layer(x, turns, lengths)
        blocks = self.last_norm(x).unflatten(0, (-1, block**2)).transpose(1, 2)  # channel by channel
        tokens = F.linear(blocks.flatten(1), self.merge.weight.flatten(1), self.merge_bias.weight)
        return EncodedImages(self.merger(tokens))

    def _positions(self, grid: Grid, at: Tensor) -> Tensor:
        """Return the vectors [n, C] of patches in the rows and columns `at` [n, 2] of an image: those of the square are
        stretched over it.
        """
        assert self.positions is not None
        side = round(self.spec.num_positions**0.5)
        square = self.positions.weight.float().view(side, side, -1).permute(2, 0, 1)[None]
        positions = (at + 0.5) / torch.tensor(grid, device=at.device) * 2 - 1  # from -1 to 1
        found = F.grid_sample(
            square, positions.flip(1)[None, :, None], "bicubic", padding_mode="border", align_corners=False
        )
        return found[0, :, :, 0].T.to(self.positions.weight.dtype)


class Merger(nn.Module):
    """A projection of tokens and a gated MLP: [T, out] → [T, out]."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__()
        self._kind = spec.activation
        self.projection = Linear(scope, out_size, {"proj": out_size})
        self.norm = LayerNorm(scope / "post_projection_norm", out_size, spec.projector_eps, bias=True)
        self.up = Linear(scope, out_size, dict.fromkeys(("gate_proj", "up_proj"), spec.projector_size))
        self.down = Linear(scope, spec.projector_size, {"down_proj": out_size})

    def forward(self, x: Tensor) -> Tensor:
        x = kernels.activation(self.norm(self.projection.run(x)), "gelu")
        return self.down.run(gated(self.up.run(x), self._kind))
