"""Families with recurrent layers beside attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense, num_layers, with_names
from engine.models.families.experts import experts
from engine.models.families.fields import Config, flag, integer, number
from engine.models.recurrent_spec import ShortConvSpec
from engine.models.spec import DenseSpec, ModelSpec, MoESpec, Norms

MAX_KERNEL = 32  # inputs of a convolution that a token sees

# Liquid's names of tensors, and ours.
LFM2_NAMES = (
    ("embedding_norm", "norm"),
    (".feed_forward.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
    (".expert_bias", ".gate.e_score_correction_bias"),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
)


def lfm2(config: Config) -> ModelSpec:
    """LFM2 and LFM2.5: gated short convolutions in most layers."""
    size = integer(config, "block_ff_dim", integer(config, "intermediate_size", 12288))
    if flag(config, "block_auto_adjust_ff_dim", True):
        size, multiple = 2 * size // 3, integer(config, "block_multiple_of", 256)
        size = int(number(config, "block_ffn_dim_multiplier", 1.0) * size)
        size = -(-size // multiple) * multiple
    return _lfm2(config, dense({**config, "intermediate_size": size}))


def lfm2_moe(config: Config) -> ModelSpec:
    """LFM2-8B-A1B and LFM2-24B-A2B: experts in all but the first layers."""
    mlp = experts(config, scoring="sigmoid", renormalise=flag(config, "norm_topk_prob", True))
    router = replace(mlp.router, scale=number(config, "routed_scaling_factor", 1.0))
    mlp = replace(mlp, router=router, correction=flag(config, "use_expert_bias", True))
    first = integer(config, "num_dense_layers", 2, minimum=0)
    return _lfm2(config, [dense(config) if layer < first else mlp for layer in range(num_layers(config))])


def _lfm2(config: Config, mlp: DenseSpec | MoESpec | Sequence[DenseSpec | MoESpec]) -> ModelSpec:
    config = {"rope_theta": 1e6, "num_key_value_heads": 8, "norm_eps": 1e-5, **config}
    config["tie_word_embeddings"] = flag(config, "tie_embedding", flag(config, "tie_word_embeddings", True))
    conv = ShortConvSpec(
        channels=integer(config, "hidden_size"),
        kernel_size=integer(config, "conv_L_cache", 3, minimum=2, maximum=MAX_KERNEL),
        bias=flag(config, "conv_bias"),
    )
    mixer = attention(config, qk_norm=True)
    mixers = [mixer if attends else conv for attends in _attends(config, "conv", _attention_layers(config))]
    norms = Norms(before_mixer="operator_norm", before_mlp="ffn_norm")
    spec = decoder(config, mixers, mlp, norms=norms, eps_name="norm_eps")
    return with_names(spec, LFM2_NAMES)


def _attention_layers(config: Config) -> list[bool]:
    """Return which layers attend where `layer_types` is missing: those of `full_attn_idxs`, by default all."""
    count, indices = num_layers(config), config.get("full_attn_idxs")
    if indices is None:
        return [True] * count
    if not isinstance(indices, list) or not all(isinstance(index, int) for index in indices):
        raise ModelError(f"'full_attn_idxs' must be a list of layers, got {indices!r}")
    return [layer in indices for layer in range(count)]


def _attends(config: Config, recurrent: str, default: Sequence[bool]) -> Sequence[bool]:
    """Return which layers attend, by `layer_types`. recurrent: the name of the other layers."""
    count, types = num_layers(config), config.get("layer_types")
    if types is None:
        return default
    known = "full_attention", recurrent
    if not isinstance(types, list) or len(types) != count or not all(name in known for name in types):
        raise ModelError(
            f"'layer_types' must be a list of num_hidden_layers={count} names, {' or '.join(known)}, got {types!r}"
        )
    if "full_attention" not in types:
        raise ModelError("'layer_types' must name full_attention: models without attention are not supported")
    return [name == "full_attention" for name in types]
