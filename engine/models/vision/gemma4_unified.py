"""The images of Gemma 4 12B, which has no encoder. Shapes as in `engine.models.vision.layers`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.models.layers import Linear
from engine.models.matrix import Scope
from engine.models.norms import LayerNorm, UnitRMSNorm
from engine.models.spec import Grid, VisionSpec
from engine.models.vision.layers import EncodedImages, Vector, VisionEncoder, patch_positions

EPS = 1e-5  # of LayerNorms


class Gemma4Projector(VisionEncoder):
    """Projects each patch, with learnt vectors of its row and column, to a token."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__(spec)
        self.layers = nn.ModuleList()
        size, width, own = spec.hidden_size, spec.intermediate_size, scope / "vision_embedder"
        self.pixel_norm = LayerNorm(own / "patch_ln1", width, EPS, bias=True)
        self.patch_embed = Linear(own, width, {"patch_dense": size}, bias=True)
        self.patch_norm = LayerNorm(own / "patch_ln2", size, EPS, bias=True)
        self.positions = Vector(own, "pos_embedding", spec.num_positions, 2, size)
        self.position_norm = LayerNorm(own / "pos_norm", size, EPS, bias=True)
        self.norm = UnitRMSNorm(scope / "embed_vision" / "embedding_pre_projection_norm", size, spec.eps)
        self.projection = Linear(scope / "embed_vision", size, {"embedding_projection": out_size})

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> EncodedImages:
        table = self.positions.weight
        pixels = patches.permute(0, 2, 3, 1).flatten(1).to(table.dtype) / 255
        row, column = torch.cat([patch_positions(grid, 1) for grid in grids]).to(patches.device).unbind(1)
        x = self.patch_norm(self.patch_embed.run(self.pixel_norm(pixels)))
        x = self.position_norm(x + (table[column, 0] + table[row, 1]))
        return EncodedImages(self.projection.run(self.norm(x)))
