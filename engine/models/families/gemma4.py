"""Gemma 4: two kinds of attention, experts, layers that share a KV cache."""

from __future__ import annotations

import math
from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense, num_layers, slides, windows_of
from engine.models.families.experts import experts
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.other_norms import GELU, GEMMA
from engine.models.spec import AttentionSpec, DenseSpec, ExpertNames, ModelSpec, MoESpec, ParallelNorms, PerLayerSpec

KINDS = ("full_attention", "sliding_attention")
ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
NAMES = ExpertNames(
    router="router.proj", stacked=("experts.gate_up_proj", "experts.down_proj"), suffix="_", shared="mlp"
)
SEPARATE = ExpertNames(  # of a GGUF file
    router="router.proj",
    gate="experts.{}.gate_proj",
    up="experts.{}.up_proj",
    down="experts.{}.down_proj",
    shared="mlp",
)
PARALLEL_NORMS = ParallelNorms(
    after_shared="post_feedforward_layernorm_1",
    before_experts="pre_feedforward_layernorm_2",
    after_experts="post_feedforward_layernorm_2",
)


def gemma4(config: Config) -> ModelSpec:
    """Gemma 4, text: 31B; 26B-A4B with experts beside the dense MLP; E2B and E4B, whose last layers share KV caches."""
    if config.get("use_bidirectional_attention") == "all":
        raise ModelError("'use_bidirectional_attention' must not be 'all': attention to later tokens is not supported")
    slide = slides(config, 6)
    slide[-1] = False  # the last layer always has full attention
    count = num_layers(config)
    num_shared = integer(config, "num_kv_shared_layers", 0, minimum=0, maximum=count - 1)
    own = [_attention(config, KINDS[here], layer) for layer, here in enumerate(slide)]
    mixers, unused = share_caches(own, slide, num_shared)
    windows = windows_of(config, slide, 512)
    mlps = _mlps(config, count - num_shared)
    spec = decoder(config, mixers, mlps, windows=windows, norms=GEMMA)
    return replace(
        spec,
        layers=tuple(replace(layer, output_scale=True) for layer in spec.layers),
        embedding_multiplier=math.sqrt(spec.hidden_size),
        logits_soft_cap=0.0
        if config.get("final_logit_softcapping") is None
        else number(config, "final_logit_softcapping"),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        per_layer=_per_layer(config),
        unused=unused,
    )


def share_caches(
    mixers: list[AttentionSpec], slide: list[bool], num_shared: int
) -> tuple[list[AttentionSpec], tuple[str, ...]]:
    """Let the last layers read the cache of the last one before them that is of their kind.

    Returns their attention and the names of their tensors that are not read. Raises `ModelError` if there is none.
    """
    first, shared = len(mixers) - num_shared, list(mixers)
    for layer in range(first, len(mixers)):
        sources = [source for source in range(first) if slide[source] == slide[layer]]
        if not sources:
            raise ModelError(f"'num_kv_shared_layers' ({num_shared}) leaves no {KINDS[slide[layer]]} to share")
        shared[layer] = replace(mixers[layer], kv_of=sources[-1])
    names = [(layer, name) for layer in range(first, len(mixers)) for name in ("k_proj", "v_proj", "k_norm")]
    return shared, tuple(f"layers.{layer}.self_attn.{name}." for layer, name in names)


def _attention(config: Config, kind: str, layer: int) -> AttentionSpec:
    """Create the attention. Full attention has its own head size and number of heads, and may use keys as values."""
    is_full, bias = kind == "full_attention", flag(config, "attention_bias")
    tied = is_full and flag(config, "attention_k_eq_v")
    config = {"head_dim": 256, "rope_parameters": ROPE, **config}
    if is_full:
        if (sizes := config.get("per_layer_config")) is None:  # as published; else as transformers writes it
            sizes = {str(layer): {"head_dim": integer(config, "global_head_dim", 512)}}
            if tied and config.get("num_global_key_value_heads") is not None:
                sizes[str(layer)]["num_key_value_heads"] = config["num_global_key_value_heads"]
        if not isinstance(sizes, dict) or not isinstance(sizes.get(str(layer), {}), dict):
            raise ModelError(f"'per_layer_config' must be an object of objects, got {sizes!r}")
        config = {**config, **sizes.get(str(layer), {})}
    mixer = attention(config, qkv_bias=bias, o_bias=bias, qk_norm=True, layer_type=kind)
    return replace(mixer, scale=1.0, v_norm=True, key_is_value=tied)


def _mlps(config: Config, first_shared: int) -> list[DenseSpec | MoESpec]:
    mlp = dense(config, activations=GELU)
    if flag(config, "enable_moe_block"):
        chosen = {"num_experts_per_tok": config.get("top_k_experts")}
        of_experts = experts({**config, **chosen}, count=("num_experts",), renormalise=True, activations=GELU)
        both = replace(
            of_experts,
            activation="gelu_tanh",
            shared=mlp,
            parallel_norms=PARALLEL_NORMS,
            router_norm_eps=number(config, "rms_norm_eps", 1e-6),
            expert_scale=True,
            names=SEPARATE if flag(config, "separate_experts") else NAMES,
        )
        return [both] * num_layers(config)
    wide = replace(mlp, intermediate_size=2 * mlp.intermediate_size) if flag(config, "use_double_wide_mlp") else mlp
    return [mlp if layer < first_shared else wide for layer in range(num_layers(config))]


def _per_layer(config: Config) -> PerLayerSpec | None:
    size = integer(config, "hidden_size_per_layer_input", 256, minimum=0)
    if not size:
        return None
    vocab_size = integer(config, "vocab_size_per_layer_input", 262144)
    if vocab_size < integer(config, "vocab_size"):
        raise ModelError(f"'vocab_size_per_layer_input' ({vocab_size}) must not be below 'vocab_size'")
    return PerLayerSpec(size=size, vocab_size=vocab_size)
