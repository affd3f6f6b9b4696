"""The image encoder of Mistral 3: Pixtral. Shapes as in `engine.models.vision.layers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import kernels
from engine.models.layers import Linear
from engine.models.matrix import Scope
from engine.models.norms import RMSNorm
from engine.models.spec import Grid, VisionSpec
from engine.models.vision.layers import (
    EncodedImages,
    EncoderLayer,
    LayerForm,
    PatchEmbedding,
    VisionEncoder,
    patch_positions,
    rope_frequencies,
)

FORM = LayerForm(
    norms=("attention_norm", "ffn_norm"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    norm="rms",
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
)


class PixtralEncoder(VisionEncoder):
    """A transformer with RoPE whose pairs turn by row and by column in turns."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__(spec)
        tower, form = scope / "vision_tower", replace(FORM, eps=spec.eps)
        self.patch_embed = PatchEmbedding(spec, tower / "patch_conv", bias=False)
        self.first_norm = RMSNorm(tower / "ln_pre", spec.hidden_size, spec.eps)
        layers = tower / "transformer" / "layers"
        self.layers = nn.ModuleList(EncoderLayer(spec, form, layers / i) for i in range(spec.num_layers))
        self.projector = Projector(spec, out_size, scope / "multi_modal_projector")
        frequencies = rope_frequencies(spec.head_dim, spec.theta, scope.device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    frequencies: Tensor  # [head_dim / 2]

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> EncodedImages:
        x = self.first_norm(self.patch_embed(patches))
        at = torch.cat([patch_positions(grid, self.spec.merge_size) for grid in grids]).to(x.device).float()
        row, column = at.unbind(1)
        # The pairs of even numbers turn by row and come first.
        by_row, by_column = row[:, None] * self.frequencies[::2], column[:, None] * self.frequencies[1::2]
        angles = torch.cat([by_row, by_column], 1)  # [N, head_dim / 2]
        turns, lengths = (angles.cos(), angles.sin()), [rows * columns for rows, columns in grids]
        for _, layer in self._computed():
            x = layer(x, turns, lengths)
        return EncodedImages(self.projector(x))


class Projector(nn.Module):
    """Merges the patches of each block into a token of the text model: [N, C] → [T, out]."""

    def __init__(self, spec: VisionSpec, out_size: int, scope: Scope) -> None:
        super().__init__()
        size, self._kind, self._block = spec.hidden_size, spec.projector_activation, spec.merge_size**2
        self.norm = RMSNorm(scope / "norm", size, spec.projector_eps)
        self.merger = Linear(scope / "patch_merger", size * self._block, {"merging_layer": size})
        self.inner = Linear(scope, size, {"linear_1": out_size}, bias=spec.projector_bias)
        self.outer = Linear(scope, out_size, {"linear_2": out_size}, bias=spec.projector_bias)

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.norm(x).unflatten(0, (-1, self._block)).transpose(1, 2)  # channel by channel
        return self.outer.run(kernels.activation(self.inner.run(self.merger.run(blocks.flatten(1))), self._kind))
