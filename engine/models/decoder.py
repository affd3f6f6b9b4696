"""The transformer decoder, for every family.

Shapes: T tokens of the step, H query heads, Hkv key heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from engine.models.attention import Attention, AttentionMetadata
from engine.models.formats.floats import FLOATS
from engine.models.layers import Embedding, Linear, LMHead, RMSNorm, Scope
from engine.models.mlp import MLP
from engine.models.rope import rope_table
from engine.models.spec import LayerSpec, ModelSpec


class Decoder(nn.Module):
    """Token ids to logits: one rank's part of the model. Weights are empty until weights.py fills them."""

    def __init__(self, spec: ModelSpec, scope: Scope, *, max_model_len: int | None = None) -> None:
        """`max_model_len`: positions that the rotary tables cover; None: the model's whole context.

        ModelError when the model cannot be divided among the scope's ranks.
        """
        super().__init__()
        self.spec = spec.for_rank(scope.shard)
        ropes = dict.fromkeys(layer.mixer.rope for layer in spec.layers)
        tables = {
            rope: rope_table(rope, max_model_len or spec.context_length).to(scope.device) if rope else None
            for rope in ropes
        }
        body, eps = scope / "model", spec.rms_norm_eps
        self.embed_tokens = Embedding(body / "embed_tokens", spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(layer, spec, tables[layer.mixer.rope], body / "layers" / i)
            for i, layer in enumerate(spec.layers)
        )
        self.norm = RMSNorm(body / "norm", spec.hidden_size, eps)
        if spec.tie_word_embeddings:
            scope = replace(scope, weight_formats=FLOATS)  # the embedding's
        self.lm_head = LMHead(scope, spec.vocab_size, spec.hidden_size)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def pack_weights(self) -> None:
        """Repack all filled weights for the products of their device. They can no longer be filled."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: Sequence[Tensor],
        attention: Sequence[AttentionMetadata],
    ) -> Tensor:
        """input_ids [T], positions [T] integer → hidden [T, hidden], before the final norm.

        For each layer: kv_cache [2, num_blocks, Hkv, block_size, D], which gains the step's keys and values (a strided view
        where the kernels take one), and attention, one object for all layers of the same cache group.
        """
        hidden = self.embed_tokens(input_ids)
        for layer, kv, metadata in zip(self.layers, kv_cache, attention, strict=True):
            hidden = layer(hidden, positions, kv, metadata)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The final norm and the output head: [N, hidden] -> [N, vocab], in the model's dtype; in `out` where that is given."""
        return self.lm_head.after_norm(hidden, self.norm, out)


class DecoderLayer(nn.Module):
    """Attention, then MLP: each reads the normed residual stream and adds to it, in place."""

    def __init__(self, layer: LayerSpec, spec: ModelSpec, cos_sin: Tensor | None, scope: Scope) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_norm = RMSNorm(scope / "input_layernorm", size, eps)
        self.attention = Attention(layer.mixer, size, eps, cos_sin, scope / "self_attn")
        self.post_attention_norm = RMSNorm(scope / "post_attention_layernorm", size, eps)
        self.mlp = MLP(layer.mlp, size, scope / "mlp")

    def forward(self, hidden: Tensor, positions: Tensor, kv: Tensor, metadata: AttentionMetadata) -> Tensor:
        hidden = self.attention(hidden, self.input_norm, positions, kv, metadata)
        return self.mlp(hidden, self.post_attention_norm)
