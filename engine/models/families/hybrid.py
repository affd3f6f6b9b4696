"""Families with recurrent layers beside attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import MAX_HEAD_DIM, attention, decoder, dense, num_layers, with_names
from engine.models.families.experts import every, experts
from engine.models.families.fields import Config, flag, integer, number
from engine.models.recurrent_spec import DeltaNetSpec, ShortConvSpec
from engine.models.spec import DenseSpec, ExpertNames, GateSpec, ModelSpec, MoESpec, Norms

MAX_KERNEL = 32  # inputs of a convolution that a token sees

SHARED_SIZE = "shared_expert_intermediate_size"
STACKED = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"

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


def qwen3_next(config: Config) -> ModelSpec:
    """Qwen3-Next and Qwen3-Coder-Next: gated delta nets in three of four layers, gated attention, experts."""
    config = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512} | config
    return _delta_net({"delta_net_parts": "fused"} | config, _qwen_experts(config))


def qwen3_5(config: Config) -> ModelSpec:
    """Qwen3.5, 3.6 and 3.8, dense, text: gated delta nets in three of four layers, gated attention."""
    return _delta_net(config, dense(config))


def qwen3_5_moe(config: Config) -> ModelSpec:
    """Qwen3.5 and 3.6 with experts, text: gated delta nets in three of four layers, gated attention."""
    config = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512} | config
    return _delta_net(config, _qwen_experts(config))


def qwen3_5_moe_stacked(config: Config) -> ModelSpec:
    """Qwen3.5 with experts as published: in stacked tensors, unless they are quantised or the index says otherwise."""
    spec = qwen3_5_moe(config)
    if spec.quantization is not None or flag(config, "separate_experts"):
        return spec
    layers = (
        replace(layer, mlp=replace(layer.mlp, names=replace(layer.mlp.names, stacked=STACKED, suffix="_")))
        if isinstance(layer.mlp, MoESpec)
        else layer
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def _qwen_experts(config: Config) -> list[DenseSpec | MoESpec]:
    mlp = experts(config, renormalise=flag(config, "norm_topk_prob", True))
    shared = replace(dense(config | {"intermediate_size": 1}), intermediate_size=integer(config, SHARED_SIZE, 512))
    mlp = replace(mlp, shared=shared, shared_gate=True, names=ExpertNames(shared="mlp.shared_expert"))
    return every(config, mlp)


def _delta_net(config: Config, mlp: DenseSpec | MoESpec | Sequence[DenseSpec | MoESpec]) -> ModelSpec:
    """Create a decoder of gated delta nets and gated attention. `delta_net_parts`: see `DeltaNetSpec.parts`."""
    parts = config.get("delta_net_parts", "apart")
    if parts not in ("apart", "gates", "fused", "tiled"):
        raise ModelError(f"'delta_net_parts' must be apart, gates, fused or tiled, got {parts!r}")
    num_keys, num_values = (
        integer(config, f"linear_num_{name}_heads", default) for name, default in (("key", 16), ("value", 32))
    )
    if num_values % num_keys:
        raise ModelError(
            f"'linear_num_value_heads' ({num_values}) must be a multiple of 'linear_num_key_heads' ({num_keys})"
        )
    net = DeltaNetSpec(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=integer(config, "linear_key_head_dim", 128, maximum=MAX_HEAD_DIM),
        value_dim=integer(config, "linear_value_head_dim", 128, maximum=MAX_HEAD_DIM),
        kernel_size=integer(config, "linear_conv_kernel_dim", 4, minimum=2, maximum=MAX_KERNEL),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        parts=parts,
    )
    bias = flag(config, "attention_bias")
    mixer = attention({"head_dim": 256} | config, qkv_bias=bias, o_bias=bias, qk_norm=True, rotary_factor=0.25)
    interval = integer(config, "full_attention_interval", 4)
    default = [(layer + 1) % interval == 0 for layer in range(num_layers(config))]
    attends = _attends(config, "linear_attention", default)
    mixers = [replace(mixer, gate=GateSpec()) if each else net for each in attends]
    spec = decoder(config, mixers, mlp)
    return replace(spec, norm_offset=1.0, mtp="mtp", unused=("mtp.", *spec.unused))


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
