"""The image encoder of InternVL, in both published forms. Shapes as in `engine.models.vision.layers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the parts in a checkpoint."""

    tower: str
    first: str
    positions: str
    patches: str
    layers: str
    form: LayerForm
    qk_norms: tuple[str, str]
    projector: str
    norm: str
    inner: str
    outer: str


FORM = LayerForm(
    norms=("layernorm_before", "layernorm_after"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.projection_layer",
    up=("mlp.fc1",),
    down="mlp.fc2",
    scales=("lambda_1", "lambda_2"),
)
TRANSFORMERS = Names(
    tower="vision_tower",
    first="cls_token",
    positions="position_embeddings",
    patches="patch_embeddings.projection",
    layers="encoder.layer",
    form=FORM,
    qk_norms=("attention.q_norm", "attention.k_norm"),
    projector="multi_modal_projector",
    norm="layer_norm",
    inner="linear_1",
    outer="linear_2",
)
PUBLISHED = Names(  # by OpenGVLab
    tower="vision_model",
    first="class_embedding",
    positions="position_embedding",
    patches="patch_embedding",
    layers="encoder.layers",
    form=replace(FORM, norms=("norm1", "norm2"), qkv=("attn.qkv",), out="attn.proj", scales=("ls1", "ls2")),
    qk_norms=("attn.q_norm", "attn.k_norm"),
    projector="mlp1",
    norm="0",
    inner="1",
    outer="3",
)


class InternEncoder(VisionEncoder):
    """A transformer over the tiles of an image, each with a vector of its own before its patches."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__(spec)
        names, size = PUBLISHED if spec.kind == "intern_chat" else TRANSFORMERS, spec.hidden_size
        tower, projector = scope / names.tower, scope / names.projector
        embeddings = tower / "embeddings"
        self.patch_embed = PatchEmbedding(spec, embeddings / names.patches, bias=True)
        self.first = Vector(embeddings, names.first, 1, 1, size)
        self.positions = Vector(embeddings, names.positions, 1, 1 + spec.num_positions, size)
        qk_norms = names.qk_norms if spec.qk_norm else ()
        form = replace(names.form, eps=spec.eps, norm=spec.norm, qkv_bias=spec.qkv_bias, qk_norms=qk_norms)
        layers = tower / names.layers
        self.layers = nn.ModuleList(EncoderLayer(spec, form, layers / i) for i in range(spec.num_layers))
        merged, self._kind = size * spec.merge_size**2, spec.projector_activation
        self.norm = LayerNorm(projector / names.norm, merged, spec.projector_eps, bias=True)
        self.inner = Linear(projector, merged, {names.inner: out_size}, bias=True)
        self.outer = Linear(projector, out_size, {names.outer: out_size}, bias=True)

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
