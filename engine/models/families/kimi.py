"""Kimi Linear: Kimi delta attention in three of four layers, latent attention without RoPE, experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.models.errors import ModelError
from engine.models.families.common import MAX_HEAD_DIM, decoder, latent_attention, num_layers, with_names
from engine.models.families.experts import deepseek_mlps
from engine.models.families.fields import Config, integer, number
from engine.models.families.hybrid import MAX_KERNEL
from engine.models.recurrent_spec import KdaSpec
from engine.models.spec import ModelSpec, RopeSpec

# Names of fields in published files, and those of other families.
FIELDS = {
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "model_max_length": "max_position_embeddings",
}
NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".forget_gate.", "."),  # in modules of transformers, and so in adapters
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)


def kimi_linear(config: Config) -> ModelSpec:
    """Kimi Linear: Kimi delta attention in three of four layers, latent attention without RoPE, experts."""
    config = {FIELDS.get(name, name): value for name, value in config.items()}
    if config.get("mla_use_nope", True) is not True:
        raise ModelError("'mla_use_nope' must be true: latent attention with RoPE is not supported here")
    linear: Any = config.get("linear_attn_config") or {}
    if not isinstance(linear, dict):
        raise ModelError(f"'linear_attn_config' must be an object, got {linear!r}")
    sizes = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    sizes["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    config |= {ours: linear[theirs] for theirs, ours in sizes.items() if theirs in linear}
    delta = KdaSpec(
        num_heads=integer(config, "linear_num_heads", 32),
        head_dim=integer(config, "linear_head_dim", 128, maximum=MAX_HEAD_DIM),
        kernel_size=integer(config, "linear_conv_kernel_dim", 4, minimum=2, maximum=MAX_KERNEL),
        norm_eps=number(config, "rms_norm_eps", 1e-5),
    )
    kinds, dense_first = config.get("mlp_layer_types"), integer(config, "first_k_dense_replace", 1, minimum=0)
    if isinstance(kinds, list):
        dense_first = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
        if set(kinds[dense_first:]) - {"sparse"}:
            raise ModelError(f"'mlp_layer_types' must be dense, then sparse, got {kinds!r}")
    if config.get("moe_layer_freq", 1) != 1:
        raise ModelError("'moe_layer_freq' must be 1")
    latent = latent_attention(config)
    # Keys and queries keep the channels that others rotate: frequencies are 0.
    still = RopeSpec(rotary_dim=latent.rope.rotary_dim, theta=latent.rope.theta, scaling="proportional")
    latent = replace(latent, rope=still)
    mixers = [latent if attends else delta for attends in _attends(config, linear)]
    mlps = deepseek_mlps({"n_shared_experts": 1, **config, "first_k_dense_replace": dense_first})
    return with_names(decoder(config, mixers, mlps), NAMES)


def _attends(config: Config, linear: dict[str, Any]) -> list[bool]:
    """Return which layers attend: by `layer_types`, or by `full_attn_layers`, which counts from 1."""
    count, types, chosen = num_layers(config), config.get("layer_types"), linear.get("full_attn_layers")
    if isinstance(types, list) and len(types) == count and not set(types) - {"full_attention", "linear_attention"}:
        attends = [kind == "full_attention" for kind in types]
    elif types is None and isinstance(chosen, list):
        attends = [layer + 1 in chosen for layer in range(count)]
    elif types is None:
        attends = [layer > 0 and layer % 4 == 0 for layer in range(count)]
    else:
        raise ModelError(f"'layer_types' must be a list of num_hidden_layers={count} names, got {types!r}")
    if not any(attends):
        raise ModelError("at least one layer must attend: models without attention are not supported")
    return attends
