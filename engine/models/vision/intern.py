"""The image encoder of InternVL. Shapes as in `engine.models.vision.layers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

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
)

FORM = LayerForm(
    norms=("layernorm_before", "layernorm_after"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.projection_layer",
    up=("mlp.fc1",),
    down="mlp.fc2",
    scales=("lambda_1", "lambda_2"),
)
QK_NORMS = "attention.q_norm", "attention.k_norm"


class InternEncoder(VisionEncoder):
    """A transformer over the tiles of an image, each with a vector of its own before its patches."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__(spec)
        tower, projector, size = scope / "vision_tower", scope / "multi_modal_projector", spec.hidden_size
        embeddings = tower / "embeddings"
        self.patch_embed = PatchEmbedding(spec, embeddings / "patch_embeddings" / "projection", bias=True)
        self.first = Vector(embeddings, "cls_token", 1, 1, size)
        self.positions = Vector(embeddings, "position_embeddings", 1, 1 + spec.num_positions, size)
        form = replace(
            FORM, eps=spec.eps, norm=spec.norm, qkv_bias=spec.qkv_bias, qk_norms=QK_NORMS if spec.qk_norm else ()
        )
        layers = tower / "encoder" / "layer"
        self.layers = nn.ModuleList(EncoderLayer(spec, form, layers / i) for i in range(spec.num_layers))
        merged, self._kind = size * spec.merge_size**2, spec.projector_activation
        self.norm = LayerNorm(projector / "layer_norm", merged, spec.projector_eps, bias=True)
        self.inner = Linear(projector, merged, {"linear_1": out_size}, bias=True)
        self.outer = Linear(projector, out_size, {"linear_2": out_size}, bias=True)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> EncodedImages:
        assert self.spec.tile is not None
        rows, columns = self.spec.tile
        row, column = patch_positions((rows, columns), self.spec.merge_size).to(patches.device).unbind(1)
        own, positions = self.positions.weight[0, :1], self.positions.weight[0, 1:][row * columns + column]
        tiles = self.patch_embed(patches).unflatten(0, (-1, rows * columns)) + positions
        first = (self.first.weight[0] + own).expand(len(tiles), 1, -1)
        length = 1 + rows * columns
        x = torch.cat([first, tiles], 1).flatten(0, 1)
        for _, layer in self._computed():
            x = layer(x, None, [length] * len(tiles))
        tokens = x.unflatten(0, (-1, length))[:, 1:].reshape(-1, self.spec.merge_size**2 * x.shape[1])
        inner = kernels.activation(self.inner.run(self.norm(tokens)), self._kind)
        return EncodedImages(self.outer.run(inner))
