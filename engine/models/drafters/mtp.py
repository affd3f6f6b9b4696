"""Multi-token prediction: a layer that some checkpoints hold after the decoder's, which predicts one token further.

It reads the target's hidden state at a position and the token after that position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from engine.models.attention import Attention, AttentionMetadata
from engine.models.decoder import Decoder, DecoderLayer, norm_maker
from engine.models.drafters.draft_head import CutHead
from engine.models.formats import weight_formats
from engine.models.latent import LatentAttention
from engine.models.layers import Linear
from engine.models.matrix import Scope
from engine.models.recurrent_spec import RecurrentSpec
from engine.models.residual import ResidualStream
from engine.models.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class MTPNames:
    """Names in the checkpoint, below `root`."""

    root: str
    layer: str  # "": the layer's tensors stand beside the others
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str


def mtp_names(spec: ModelSpec) -> MTPNames | None:
    """Return the names of a model's prediction layer; None: its family has none that is known."""
    if spec.mtp == "mtp":  # Qwen3-Next, Qwen3.5
        return MTPNames("mtp", "layers.0", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    if spec.mtp == "layers":  # DeepSeek V3, GLM
        return MTPNames(f"model.layers.{spec.num_layers}", "", "enorm", "hnorm", "eh_proj", "shared_head.norm")
    return None


class MTPHead(nn.Module):
    """A prediction layer: norm(layer(W · [norm(embedding); norm(hidden)])). Embedding and head are the target's."""

    def __init__(self, spec: ModelSpec, names: MTPNames, cos_sin: Tensor | None, scope: Scope) -> None:
        """`spec`: of a decoder whose only layer is this one, see `DraftSpec`. cos_sin: `rope_table` of its RoPE."""
        super().__init__()
        root, make_norm, size = scope / names.root, norm_maker(spec), spec.hidden_size
        self.embedding_norm = make_norm(root / names.embedding_norm, size)
        self.hidden_norm = make_norm(root / names.hidden_norm, size)
        floats = replace(root, weight_formats=weight_formats(None))  # in quantised checkpoints, too
        self.projection = Linear(floats, 2 * size, {names.projection: size})
        of_layer = root / names.layer if names.layer else root
        self.layer = DecoderLayer(spec.layers[0], size, cos_sin, make_norm, of_layer)
        self.norm = make_norm(root / names.norm, size)
        self.lm_head: CutHead | None = None  # instead of the target's

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, kv: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Return what the head reads, [T, hidden], or the rows at `metadata.logits_indices`.

        embedded [T, hidden]: of the tokens that follow. hidden [T, hidden]: the target's after its final norm, or the
        result of this layer for the token before.
        """
        x = self.projection.run(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), 1))
        stream = self.layer(ResidualStream(x), positions, kv, metadata)
        normed: Tensor = self.norm(stream.hidden)
        return normed


def mtp_spec(spec: ModelSpec) -> ModelSpec:
    """Return the specification of a decoder that has a model's prediction layer alone: one like its last layers."""
    return replace(spec, layers=(next(each for each in reversed(spec.layers) if not is_recurrent(each)),))


def is_recurrent(layer: LayerSpec) -> bool:
    return isinstance(layer.mixer, RecurrentSpec)


def cos_sin_of(target: Decoder, spec: ModelSpec) -> Tensor | None:
    """Return the RoPE table of the target's layers that are like that of `mtp_spec`."""
    for layer, module in zip(target.spec.layers, target.layers, strict=True):
        if not is_recurrent(layer) and layer.mixer.rope == spec.layers[0].mixer.rope:
            attention = cast(DecoderLayer, module).attention
            assert isinstance(attention, Attention | LatentAttention)
            return attention.cos_sin
    raise AssertionError("the layer is like one of the target's")
