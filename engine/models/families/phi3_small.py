"""Phi-3-small, whose code comes with the model."""

from __future__ import annotations

from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, num_layers, with_names
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.rope import phi_longrope
from engine.models.spec import DenseSpec, ModelSpec, SparseSpec

NAMES = (
    ("model.final_layernorm.", "model.norm."),
    (".self_attn.query_key_value.", ".self_attn.qkv_proj."),
    (".self_attn.dense.", ".self_attn.o_proj."),
)


def phi3_small(config: Config) -> ModelSpec:
    """Phi-3-small: block-sparse attention in every other layer, LayerNorm, biases, muP's multipliers."""
    if config.get("hidden_act", "gegelu") != "gegelu":
        raise ModelError(f"'hidden_act' must be gegelu, got {config['hidden_act']!r}")
    if number(config, "rope_position_scale", 1.0) != 1:
        raise ModelError("'rope_position_scale' must be 1")
    usual = {"num_key_value_heads": 8, "max_position_embeddings": 8192, "layer_norm_epsilon": 1e-5} | config
    usual |= {"rope_theta": number(config, "rope_embedding_base", 1e6), "rope_scaling": phi_longrope(config)}
    mixer = replace(attention(usual, qkv_bias=True, o_bias=True), fused=True, grouped=True)
    if flag(config, "mup_use_scaling", True):
        mixer = replace(mixer, scale=number(config, "mup_attn_multiplier", 1.0) / mixer.head_dim)
    sparse = replace(mixer, sparse=_blocks(config))
    every = integer(config, "dense_attention_every_n_layers", num_layers(config) + 1)
    mixers = [sparse if (layer + 1) % every else mixer for layer in range(num_layers(config))]
    mlp = DenseSpec(
        intermediate_size=integer(config, "ff_intermediate_size"),
        bias=True,
        activation="clamped_swiglu",
        limit=number(config, "gegelu_limit", 20.0),
    )
    spec = with_names(decoder(usual, mixers, mlp, eps_name="layer_norm_epsilon"), NAMES)
    return replace(
        spec,
        norm="layer_bias",
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        embedding_multiplier=number(config, "mup_embedding_multiplier", 10.0),
        logits_multiplier=1 / number(config, "mup_width_multiplier", 8.0),
    )


def _blocks(config: Config) -> SparseSpec:
    size = integer(config, "blocksparse_block_size", 64, minimum=16)
    if size & (size - 1):
        raise ModelError(f"'blocksparse_block_size' must be a power of two, got {size}")
    return SparseSpec(
        block=size,
        local=integer(config, "blocksparse_num_local_blocks", 16),
        stride=integer(config, "blocksparse_vert_stride", 8),
        head_step=0 if flag(config, "blocksparse_homo_head_pattern") else 1,
    )
