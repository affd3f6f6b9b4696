"""Families of 2025 and 2026 with switches that few others have: scaled queries, norms after RoPE, scaled experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense, latent_attention, num_layers, with_names
from engine.models.families.experts import deepseek_mlps, experts
from engine.models.families.fields import Config, flag, integer, number
from engine.models.spec import (
    DenseSpec,
    ExpertNames,
    ModelSpec,
    MoESpec,
    QueryScaling,
)

LLAMA4 = ((".feed_forward.", ".mlp."),)
LLAMA4_EXPERTS = ExpertNames(
    router="mlp.router",
    stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    suffix="_",
    transposed=True,
    shared="mlp.shared_expert",
)
HUNYUAN = ((".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."))
HUNYUAN_EXPERTS = ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp")
ERNIE_EXPERTS = ExpertNames(correction="mlp.moe_statics.e_score_correction_bias")


def ministral3(config: Config) -> ModelSpec:
    """Ministral 3 and Devstral 2: queries are scaled by their positions beyond the original context."""
    window = 0 if config.get("sliding_window") is None else integer(config, "sliding_window")
    mixer = replace(attention(config, window=window), scales_queries=True)
    return replace(decoder(config, mixer, dense(config)), query_scaling=_scaling(config))


def mistral4(config: Config) -> ModelSpec:
    """Mistral 4: latent attention, softmax router, queries that are scaled by their positions."""
    mixer = replace(latent_attention(_without_partial_rope(config)), scales_queries=True)
    mlps = [_softmax(mlp) if isinstance(mlp, MoESpec) else mlp for mlp in deepseek_mlps(config)]
    return replace(decoder(config, mixer, mlps), query_scaling=_scaling(config))


def llama4(config: Config) -> ModelSpec:
    """Llama 4, text: one expert and a shared one, layers without RoPE; contexts within one chunk of attention."""
    count = num_layers(config)
    rotates = _flags(config, "no_rope_layers", count) or [
        (layer + 1) % integer(config, "no_rope_layer_interval", 4) != 0 for layer in range(count)
    ]
    bias = flag(config, "attention_bias")
    plain = attention({"head_dim": 128, "rope_theta": 500000.0, **config}, qkv_bias=bias, o_bias=bias, interleaved=True)
    with_rope = replace(plain, qk_norm=flag(config, "use_qk_norm", True), qk_norm_weights=False)
    scaling = None
    if flag(config, "attn_temperature_tuning", True):
        beta = number(config, "attn_scale", 0.1)
        scaling = QueryScaling(beta=beta, length=integer(config, "floor_scale", 8192), offset=1)
    without = replace(plain, rope=None, scales_queries=True)
    if integer(config, "num_experts_per_tok", 1) != 1:
        raise ModelError("'num_experts_per_tok' must be 1 for Llama 4")
    mlp = experts(
        config | {"num_experts_per_tok": 1}, count=("num_local_experts",), size="intermediate_size", scoring="sigmoid"
    )
    shared = DenseSpec(intermediate_size=integer(config, "intermediate_size"))
    names = LLAMA4_EXPERTS if config.get("quantization_config") is None else replace(LLAMA4_EXPERTS, stacked=None)
    mlp = replace(mlp, shared=shared, scales_input=True, names=names)
    step = integer(config, "interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers") or range(step - 1, count, step)
    wide = dense({**config, "intermediate_size": integer(config, "intermediate_size_mlp", 16384)})
    mixers = [with_rope if here else without for here in rotates]
    spec = decoder({"rms_norm_eps": 1e-5, **config}, mixers, [mlp if i in sparse else wide for i in range(count)])
    chunk = integer(config, "attention_chunk_size", 8192)
    spec = replace(spec, context_length=min(spec.context_length, chunk), query_scaling=scaling)
    return with_names(spec, LLAMA4)


def hunyuan_dense(config: Config) -> ModelSpec:
    """Hunyuan, dense (0.5B to 7B): norms of query and key heads after RoPE."""
    bias = flag(config, "attention_bias")
    config = _with_alpha(config)
    mixer = attention(config, qkv_bias=bias, o_bias=bias, qk_norm=_has_qk_norm(config))
    return with_names(
        _tied(decoder(config, replace(mixer, rotates_first=mixer.qk_norm), dense(config)), config), HUNYUAN
    )


def hunyuan_moe(config: Config) -> ModelSpec:
    """Hunyuan-A13B: norms of query and key heads after RoPE, a shared expert."""
    bias, count = flag(config, "attention_bias"), num_layers(config)
    if flag(config, "use_cla") and integer(config, "cla_share_factor", 1) > 1:
        raise ModelError("'use_cla' is not supported: layers that share keys and values")
    config = _with_alpha(config)
    mixer = attention(config, qkv_bias=bias, o_bias=bias, qk_norm=_has_qk_norm(config))
    names = {"num_experts": "num_experts", "num_experts_per_tok": "moe_topk", "num_shared_expert": "num_shared_expert"}
    names["moe_intermediate_size"] = "moe_intermediate_size"
    own = {ours: _same(config, theirs, count) for ours, theirs in names.items()}
    own["moe_intermediate_size"] = own["moe_intermediate_size"] or config.get("intermediate_size")
    mlp = experts({**config, **own}, count=("num_experts",), renormalise=True)
    inner = integer(config, "intermediate_size") * (own["num_shared_expert"] or 1)
    mlp = replace(mlp, shared=DenseSpec(intermediate_size=inner), names=HUNYUAN_EXPERTS)
    spec = decoder(config, replace(mixer, rotates_first=mixer.qk_norm), mlp)
    return with_names(_tied(spec, config), HUNYUAN)


def ernie_moe(config: Config) -> ModelSpec:
    """ERNIE 4.5 with experts: softmax router with a correction, interleaved RoPE."""
    bias, count = flag(config, "use_bias"), num_layers(config)
    if config.get("moe_gate_act", "softmax") != "softmax":
        raise ModelError(f"'moe_gate_act' must be softmax, got {config['moe_gate_act']!r}")
    own = {"num_experts": config.get("moe_num_experts"), "num_experts_per_tok": config.get("moe_k")}
    config = {**{name: value for name, value in own.items() if value is not None}, **config}
    mlp = experts(config, count=("num_experts",), renormalise=True)
    if shared := integer(config, "moe_num_shared_experts", 0, minimum=0):
        mlp = replace(mlp, shared=DenseSpec(intermediate_size=shared * mlp.intermediate_size))
    mlp = replace(mlp, correction=True, names=ERNIE_EXPERTS)
    first, interval = integer(config, "moe_layer_start_index", 1, minimum=0), integer(config, "moe_layer_interval", 1)
    last = config.get("moe_layer_end_index")
    last = count - 1 if last in (None, -1) else integer(config, "moe_layer_end_index", minimum=0)
    sparse = [first <= layer <= last and (layer + 1) % interval == 0 for layer in range(count)]
    mixer = attention(config, qkv_bias=bias, o_bias=bias, interleaved=True)
    mlps = [mlp if here else dense(config, bias=bias) for here in sparse]
    spec = replace(decoder(config, mixer, mlps), unused=("mtp_",))
    return replace(spec, tie_word_embeddings=flag(config, "tie_word_embeddings", True))


def _scaling(config: Config) -> QueryScaling | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("llama_4_scaling_beta") is None:
        return None
    length = integer(rope, "original_max_position_embeddings")
    return QueryScaling(beta=number(rope, "llama_4_scaling_beta"), length=length)


def _without_partial_rope(config: Config) -> Config:
    """Return config.json for latent attention: its rotated part, which files name as well, has a size of its own."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    own = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return {**config, "rope_parameters": own, "rope_scaling": None}


def _softmax(mlp: MoESpec) -> MoESpec:
    router = replace(mlp.router, scoring="softmax")
    stacked = ExpertNames(stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), suffix="_")
    return replace(mlp, router=router, correction=False, names=stacked)


def _with_alpha(config: Config) -> Config:
    """Return config.json with Hunyuan's RoPE: its alpha is a larger theta, whatever the length of the context."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(field)
    if not isinstance(rope, dict) or "dynamic" not in (rope.get("rope_type"), rope.get("type")):
        return config
    if not rope.get("alpha"):
        return config
    heads = integer(config, "num_attention_heads")
    dim = integer(config, "head_dim", integer(config, "hidden_size") // heads)
    theta = number(rope, "rope_theta", number(config, "rope_theta", 10000.0))
    theta *= number(rope, "alpha") ** (dim / (dim - 2))
    return {**config, "head_dim": dim, field: {"rope_type": "default", "rope_theta": theta}}


def _has_qk_norm(config: Config) -> bool:
    return flag(config, "use_qk_norm", True)


def _tied(spec: ModelSpec, config: Config) -> ModelSpec:
    return replace(spec, tie_word_embeddings=flag(config, "tie_word_embeddings", True))


def _same(config: Config, name: str, count: int) -> Any:
    """Return a field that may be given for each of `count` layers, where it must be the same."""
    value = config.get(name)
    if isinstance(value, list):
        if not value or any(each != value[0] for each in value):
            raise ModelError(f"{name!r} must be the same in all layers, got {value!r}")
        value = value[0]
    return value


def _flags(config: Config, name: str, count: int) -> Sequence[Any] | None:
    value = config.get(name)
    if value and (not isinstance(value, list) or len(value) != count):
        raise ModelError(f"{name!r} must be a list of num_hidden_layers={count} flags, got {value!r}")
    return value or None
