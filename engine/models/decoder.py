"""The transformer decoder, for every family. Knows a ModelSpec and a step's tensors; never knows requests or files.

Shapes: T tokens of the step, H query heads, Hkv key heads, D head_dim.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor, nn

import kernels
from engine.models.attention import AttentionMetadata, attend
from engine.models.layers import Embedding, Linear, RMSNorm
from engine.models.rope import rope_table
from engine.models.spec import ModelSpec


class _Placement(TypedDict):
    dtype: torch.dtype
    device: torch.device


class Decoder(nn.Module):
    """Token ids to logits. Weights are empty until weights.py fills them."""

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, max_model_len: int | None = None
    ) -> None:
        """`max_model_len`: positions that the rotary table covers; None: the model's whole context."""
        super().__init__()
        self.spec = spec
        placement = _Placement(dtype=dtype, device=device)
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, **placement)
        self.layers = nn.ModuleList(DecoderLayer(spec, window, placement) for window in spec.sliding_windows)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **placement)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size, **placement)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        table = rope_table(spec.rope, max_model_len or spec.context_length).to(device) if spec.rope else None
        self.register_buffer("cos_sin", table, persistent=False)  # [max_model_len, rotary_dim] float32

    def pack_weights(self) -> None:
        """The weights are filled, for good: give the matrices the form that products on their device like best."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: list[Tensor], attention: AttentionMetadata
    ) -> Tensor:
        """input_ids [T], positions [T] integer, kv_cache per layer [2, num_blocks, Hkv, block_size, D], which gains the
        step's keys and values -> hidden [T, hidden], before the final norm.
        """
        hidden = self.embed_tokens(input_ids)
        for layer, kv in zip(self.layers, kv_cache, strict=True):
            hidden = layer(hidden, positions, self.cos_sin, kv, attention)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The final norm and the output head: [N, hidden] -> [N, vocab], in the model's dtype; in `out` where that is given."""
        return self.lm_head.after_norm(hidden, self.norm, out)


class DecoderLayer(nn.Module):
    """Attention, then MLP: each reads the normed residual stream and adds to it, in place."""

    def __init__(self, spec: ModelSpec, window: int, placement: _Placement) -> None:
        super().__init__()
        self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **placement)
        self.attention = Attention(spec, window, placement)
        self.post_attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **placement)
        self.mlp = MLP(spec, placement)

    def forward(
        self, hidden: Tensor, positions: Tensor, cos_sin: Tensor | None, kv: Tensor, attention: AttentionMetadata
    ) -> Tensor:
        hidden = self.attention(hidden, self.input_norm, positions, cos_sin, kv, attention)
        return self.mlp(hidden, self.post_attention_norm)


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache."""

    kv_scale: Tensor

    def __init__(self, spec: ModelSpec, window: int, placement: _Placement) -> None:
        super().__init__()
        self.spec = spec
        self.window = window
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv = Linear(spec.hidden_size, query_size, kv_size, kv_size, bias=spec.qkv_bias, **placement)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, **placement) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, **placement) if spec.qk_norm else None
        self.o = Linear(query_size, spec.hidden_size, bias=spec.o_bias, **placement)
        # What the keys and the values of each head are divided by where the cache is e4m3: [2, Hkv].
        scale = torch.ones(2, spec.num_kv_heads, dtype=torch.float32, device=placement["device"])
        self.register_buffer("kv_scale", scale, persistent=False)

    def forward(
        self,
        hidden: Tensor,
        norm: RMSNorm,
        positions: Tensor,
        cos_sin: Tensor | None,
        kv: Tensor,
        attention: AttentionMetadata,
    ) -> Tensor:
        spec = self.spec
        kv_scale = self.kv_scale if kv.dtype == torch.float8_e4m3fn else None
        query = kernels.rope_and_store(
            self.qkv.after_norm(hidden, norm),  # [T, (H + 2 Hkv) D]
            positions,
            cos_sin,
            kv[0],
            kv[1],
            attention.slot_mapping,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            q_norm=self.q_norm.weight if self.q_norm else None,
            k_norm=self.k_norm.weight if self.k_norm else None,
            eps=spec.rms_norm_eps,
            kv_scale=kv_scale,
        )  # [T, H, D]
        out = attend(
            query,
            kv,
            attention,
            scale=spec.attention_scale,
            window=self.window,
            soft_cap=spec.soft_cap,
            kv_scale=kv_scale,
        )
        return self.o.add_to(hidden, out.flatten(1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, spec: ModelSpec, placement: _Placement) -> None:
        super().__init__()
        inner = spec.intermediate_size
        self.gate_up = Linear(spec.hidden_size, inner, inner, bias=spec.mlp_bias, **placement)
        self.down = Linear(inner, spec.hidden_size, bias=spec.mlp_bias, **placement)

    def forward(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        return self.down.add_to(hidden, self.gate_up.swiglu_after_norm(hidden, norm))
