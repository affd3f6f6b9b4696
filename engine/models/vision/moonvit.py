"""The image encoder of Kimi-VL and Kimi K2.5: MoonViT. Shapes as in `engine.models.vision.layers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels
from engine.models.layers import Linear
from engine.models.matrix import Scope
from engine.models.norms import LayerNorm
from engine.models.spec import Grid, VisionSpec
from engine.models.vision.layers import (
    EncodedImages,
    EncoderLayer,
    LayerForm,
    PatchEmbedding,
    Vector,
    VisionEncoder,
    patch_positions,
    rope_frequencies,
)

FORM = LayerForm(
    norms=("norm0", "norm1"), qkv=("wqkv",), out="wo", up=("mlp.fc0",), down="mlp.fc1", turns_neighbours=True
)
PROJECTORS = {  # name, and those of its two matrices
    "kimi_vl": ("multi_modal_projector", "linear_1", "linear_2"),
    "kimi_k25": ("mm_projector", "proj.0", "proj.2"),
}


class MoonEncoder(VisionEncoder):
    """A transformer with learnt vectors of positions, and RoPE whose pairs turn by column and by row in turns."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__(spec)
        tower, form, size = scope / "vision_tower", replace(FORM, eps=spec.eps), spec.hidden_size
        side = round(spec.num_positions**0.5)
        self.patch_embed = PatchEmbedding(spec, tower / "patch_embed" / "proj", bias=True)
        self.positions = Vector(tower / "patch_embed", "pos_emb.weight", side, side, size)
        layers = tower / "encoder" / "blocks"
        self.layers = nn.ModuleList(EncoderLayer(spec, form, layers / i) for i in range(spec.num_layers))
        self.last_norm = LayerNorm(tower / "encoder" / "final_layernorm", size, spec.eps, bias=True)
        name, inner, outer = PROJECTORS[spec.kind]
        projector, self._merged = scope / name, size * spec.merge_size**2
        self.norm = LayerNorm(projector / "pre_norm", size, spec.projector_eps, bias=True)
        self.inner = Linear(projector, self._merged, {inner: self._merged}, bias=True)
        self.outer = Linear(projector, self._merged, {outer: out_size}, bias=True)
        frequencies = rope_frequencies(spec.head_dim // 2, spec.theta, scope.device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    frequencies: Tensor  # [head_dim / 4]

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> EncodedImages:
        x, merge = self.patch_embed(patches), self.spec.merge_size
        of_images = [patch_positions(grid, merge).to(x.device) for grid in grids]
        x = x + torch.cat([self._positions(grid, at) for grid, at in zip(grids, of_images, strict=True)])
        angles = torch.cat(of_images).flip(1).unsqueeze(1) * self.frequencies[:, None]  # [N, head_dim / 4, 2]
        turns, lengths = (angles.flatten(1).cos(), angles.flatten(1).sin()), [rows * columns for rows, columns in grids]
        for _, layer in self._computed():
            x = layer(x, turns, lengths)
        tokens = self.norm(self.last_norm(x)).view(-1, self._merged)
        return EncodedImages(self.outer.run(kernels.activation(self.inner.run(tokens), "gelu")))

    def _positions(self, grid: Grid, at: Tensor) -> Tensor:
        """Return the vectors [n, C] of patches in the rows and columns `at` [n, 2] of an image: the square of vectors
        is resized to the image's grid.
        """
        square = self.positions.weight.float().permute(2, 0, 1)[None]
        if grid != square.shape[2:]:
            square = F.interpolate(square, grid, mode="bicubic")
        return square[0].permute(1, 2, 0)[at[:, 0], at[:, 1]].to(self.positions.weight.dtype)
