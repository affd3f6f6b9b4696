"""The image encoder of Gemma 3: SigLIP. Shapes as in `engine.models.vision.layers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

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
    patch_positions,
)

FORM = LayerForm(
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
)


class SiglipEncoder(VisionEncoder):
    """A transformer with a learnt vector for each position of a square image. The mean of a block becomes a token."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__(spec)
        tower, projector, size = scope / "vision_tower", scope / "multi_modal_projector", spec.hidden_size
        self.patch_embed = PatchEmbedding(spec, tower / "embeddings" / "patch_embedding", bias=True)
        self.positions = Vector(tower, "embeddings.position_embedding.weight", spec.num_positions, size)
        form, layers = replace(FORM, eps=spec.eps), tower / "encoder" / "layers"
        self.layers = nn.ModuleList(EncoderLayer(spec, form, layers / i) for i in range(spec.num_layers))
        self.norm = LayerNorm(tower / "post_layernorm", size, spec.eps, bias=True)
        self.token_norm = RMSNorm(projector / "mm_soft_emb_norm", size, spec.eps, offset=1.0)
        self.projection = Vector(projector, "mm_input_projection_weight", size, out_size)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> EncodedImages:
        rows, columns = grids[0]
        row, column = patch_positions((rows, columns), self.spec.merge_size).to(patches.device).unbind(1)
        position = self.positions.weight[row * columns + column]  # the same for each image
        x = self.patch_embed(patches).unflatten(0, (len(grids), -1)) + position
        x = x.flatten(0, 1)
        for _, layer in self._computed():
            x = layer(x, None, [rows * columns] * len(grids))
        tokens = self.norm(x).unflatten(0, (-1, self.spec.merge_size**2)).mean(1)
        return EncodedImages(F.linear(self.token_norm(tokens), self.projection.weight.T))
