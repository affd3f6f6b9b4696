"""Families that scale the output of attention by gates."""

from __future__ import annotations

from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense, num_layers, slides, windows_of
from engine.models.families.experts import experts
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.newest import KINDS, sparse_layers
from engine.models.families.other_norms import GEMMA
from engine.models.spec import DenseSpec, ExpertNames, GateSpec, ModelSpec, Norms

AFMOE = Norms(after_mixer="post_attention_layernorm", before_mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm")
AFMOE_EXPERTS = ExpertNames(router="mlp.router.gate", correction="mlp.expert_bias")
LAGUNA_EXPERTS = ExpertNames(correction="mlp.experts.e_score_correction_bias", shared="mlp.shared_expert")
LAGUNA_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def laguna(config: Config) -> ModelSpec:
    """Laguna (poolside): a gate for each head, whose number may differ by layer; experts after the first layer."""
    config = {"head_dim": 128, "rope_parameters": LAGUNA_ROPES, "sliding_window": 512, **config}
    for field in ("moe_apply_router_weight_on_input", "moe_router_logit_softcapping"):
        if config.get(field):
            raise ModelError(f"{field!r} is not supported")
    slide, count = slides(config), num_layers(config)
    heads = config.get("num_attention_heads_per_layer") or [integer(config, "num_attention_heads")] * count
    if not isinstance(heads, list) or len(heads) != count:
        raise ModelError(f"'num_attention_heads_per_layer' must be a list of {count} numbers, got {heads!r}")
    gating = config.get("gating", True)
    if gating not in (True, False, "per-head", "per-element"):
        raise ModelError(f"'gating' must be true, per-head or per-element, got {gating!r}")
    gate = GateSpec(name="g_proj", activation="softplus", of_heads=gating != "per-element") if gating else None
    bias = flag(config, "attention_bias")
    mixers = [
        replace(
            attention(
                {**config, "num_attention_heads": own}, qkv_bias=bias, o_bias=bias, qk_norm=True, layer_type=KINDS[here]
            ),
            gate=gate,
        )
        for own, here in zip(heads, slide, strict=True)
    ]
    mlp = experts(config, scoring="sigmoid", renormalise=True)
    mlp = replace(
        mlp,
        router=replace(mlp.router, scale=number(config, "moe_routed_scaling_factor", 1.0)),
        correction=True,
        shared=DenseSpec(intermediate_size=integer(config, "shared_expert_intermediate_size", 512)),
        names=LAGUNA_EXPERTS,
    )
    mlps = [mlp if here else dense(config) for here in sparse_layers(config, first_dense=1)]
    return decoder(config, mixers, mlps, windows=windows_of(config, slide))


def afmoe(config: Config) -> ModelSpec:
    """Trinity (AFMoE, Arcee): gates of all channels, norms before and after each sublayer, RoPE in windows, experts."""
    config = {"head_dim": 128, "rms_norm_eps": 1e-5, **config}
    slide, bias = slides(config, integer(config, "global_attn_every_n_layers", 4)), flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
    mixer = replace(mixer, gate=GateSpec(name="gate_proj"))
    mlp = experts(config, scoring="sigmoid", renormalise=True)
    mlp = replace(
        mlp,
        router=replace(mlp.router, scale=number(config, "route_scale", 1.0)),
        correction=True,
        shared=DenseSpec(intermediate_size=integer(config, "num_shared_experts", 2) * mlp.intermediate_size),
        names=AFMOE_EXPERTS,
    )
    first = integer(config, "num_dense_layers", 1, minimum=0)
    mlps = [dense(config) if layer < first else mlp for layer in range(num_layers(config))]
    mixers = [mixer if here else replace(mixer, rope=None) for here in slide]
    spec = decoder(config, mixers, mlps, windows=windows_of(config, slide, 1024), norms=AFMOE)
    multiplier = spec.hidden_size**0.5 if flag(config, "mup_enabled") else 1.0
    return replace(spec, embedding_multiplier=multiplier)


def muse_glimmer(config: Config) -> ModelSpec:
    """Muse Glimmer, text: gates of all channels, norms of heads and embeddings without weights, windows with RoPE."""
    count = num_layers(config)
    last = [(count - 1 - layer) % 4 == 0 for layer in range(count)]
    config = {"head_dim": 128, "rms_norm_eps": 1e-5, **config}
    slide = [not each for each in last] if config.get("layer_types") is None else slides(config)
    thetas = config.get("layer_rope_theta") or [0 if each else 1 for each in last]
    if not isinstance(thetas, list) or len(thetas) != count or len({theta for theta in thetas if theta}) > 1:
        raise ModelError(f"'layer_rope_theta' must be 0 or the same number for each of {count} layers, got {thetas!r}")
    bias = flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
    mixer = replace(
        mixer,
        qk_norm_weights=False,
        scale=mixer.scale * number(config, "qk_scale_factor", 3.87),
        gate=GateSpec(name="gate_proj"),
    )
    mixers = [mixer if theta else replace(mixer, rope=None) for theta in thetas]
    norms = replace(GEMMA, after_eps=number(config, "post_norm_eps", 1e-8))
    spec = decoder(config, mixers, dense(config), windows=windows_of(config, slide, 2048), norms=norms)
    return replace(
        spec,
        norm_offset=1.0,
        final_norm_offset=0.0,
        embedding_norm="unweighted",
        logits_multiplier=number(config, "output_multiplier", 0.19611613513818404),
        logits_soft_cap=number(config, "final_logit_softcapping", 20.0),
    )
