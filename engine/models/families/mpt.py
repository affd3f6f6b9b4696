"""MPT: ALiBi instead of RoPE, with its own names of fields and tensors."""

from __future__ import annotations

import json
from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense, with_names
from engine.models.families.fields import Config, flag, integer, number
from engine.models.spec import ModelSpec

NAMES = (
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.norm_f.", "model.norm."),
    ("transformer.blocks.", "model.layers."),
    (".attn.Wqkv.", ".self_attn.qkv_proj."),
    (".attn.out_proj.", ".self_attn.o_proj."),
    (".norm_1.", ".input_layernorm."),
    (".norm_2.", ".post_attention_layernorm."),
    (".ffn.", ".mlp."),
)
MUST_BE = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "qk_ln": False,
    "prefix_lm": False,
    "clip_qkv": None,
}


def mpt(config: Config) -> ModelSpec:
    """MPT: ALiBi, LayerNorm without bias, query, key and value in one tensor, an MLP without a gate."""
    inner = config.get("attn_config") or {}
    for name, value in MUST_BE.items():
        if inner.get(name, value) != value:
            raise ModelError(f"'attn_config': {name!r} must be {json.dumps(value)}, got {inner[name]!r}")
    for name, value in (("no_bias", True), ("expansion_ratio", 4)):
        if config.get(name, value) != value:
            raise ModelError(f"{name!r} must be {json.dumps(value)}, got {config[name]!r}")
    hidden_size, num_heads = integer(config, "d_model", 2048), integer(config, "n_heads", 16)
    usual = {
        **config,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "num_hidden_layers": integer(config, "n_layers", 24),
        "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": integer(config, "max_seq_len", 2048),
        "layer_norm_epsilon": number(config, "layer_norm_epsilon", 1e-5),
    }
    mixer = attention(usual)
    scale = number(inner, "softmax_scale") if inner.get("softmax_scale") is not None else mixer.scale
    slopes = alibi_slopes(num_heads)
    mixer = replace(mixer, rope=None, alibi=slopes, scale=scale, fused=True)
    mlp = replace(dense({**usual, "hidden_act": "gelu"}, activations=("gelu",), gated=False), activation="gelu")
    spec = decoder(usual, mixer, mlp, eps_name="layer_norm_epsilon")
    tied = flag(config, "tie_word_embeddings", True)
    return replace(with_names(spec, NAMES), norm="layer", tie_word_embeddings=tied)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return 2^(-8 · i / n) for n heads. If n is not a power of two: every other slope for the next power of two."""
    filled = 1 << (num_heads - 1).bit_length()
    slopes = [2 ** (-8 * i / filled) for i in range(1, filled + 1)]
    if filled != num_heads:
        slopes = slopes[1::2] + slopes[::2]
    return tuple(slopes[:num_heads])
