"""Families with norms at other positions or of other kinds than Llama's."""

from __future__ import annotations

import math
from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense, slides, windows_of, with_names
from engine.models.families.fields import Config, flag, integer, number
from engine.models.spec import AttentionSpec, ModelSpec, Norms

AFTER = Norms(
    before_mixer="", after_mixer="post_attention_layernorm", before_mlp="", after_mlp="post_feedforward_layernorm"
)
GEMMA = Norms(
    after_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
GELU = ("gelu_pytorch_tanh",)


def gemma(config: Config) -> ModelSpec:
    """Gemma: norm weights stored minus one, scaled embeddings, GeGLU."""
    return _gemma(config, decoder(config, _gemma_attention(config), dense(config, activations=(*GELU, "gelu"))))


def gemma2(config: Config) -> ModelSpec:
    """Gemma 2: norms before and after each sublayer, soft caps, a sliding window in every other layer."""
    windows = windows_of(config, slides(config, 2), 4096)
    scale = number(config, "query_pre_attn_scalar", 256) ** -0.5
    cap = 0.0 if config.get("attn_logit_softcapping", 50.0) is None else number(config, "attn_logit_softcapping", 50.0)
    mixer = replace(_gemma_attention(config), scale=scale, soft_cap=cap)
    spec = decoder(config, mixer, dense(config, activations=GELU), windows=windows, norms=GEMMA)
    final = (
        0.0 if config.get("final_logit_softcapping", 30.0) is None else number(config, "final_logit_softcapping", 30.0)
    )
    return replace(_gemma(config, spec), logits_soft_cap=final)


def gemma3(config: Config) -> ModelSpec:
    """Gemma 3, text: norms of query and key heads; five of six layers have a sliding window and a separate RoPE."""
    slide = slides(config, integer(config, "sliding_window_pattern", 6))
    scale = number(config, "query_pre_attn_scalar", 256) ** -0.5
    if config.get("rope_local_base_freq") is not None or not config.get("rope_parameters"):
        full = config.get("rope_scaling") or {}
        full = {"rope_theta": config.get("rope_theta", 1e6), **full}
        local = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
        config = {
            **config,
            "rope_scaling": None,
            "rope_parameters": {"full_attention": full, "sliding_attention": local},
        }
    kinds = [
        replace(_gemma_attention(config, layer_type=kind), scale=scale, qk_norm=True)
        for kind in ("full_attention", "sliding_attention")
    ]
    mixers = [kinds[slides_here] for slides_here in slide]
    windows = windows_of(config, slide, 4096)
    spec = decoder(config, mixers, dense(config, activations=GELU), windows=windows, norms=GEMMA)
    stretched = integer(config, "max_position_embeddings")  # includes the linear scaling
    return replace(_gemma(config, spec), context_length=stretched)


def olmo2(config: Config) -> ModelSpec:
    """OLMo 2: norms after attention and MLP, and over all query heads and all key heads."""
    bias = flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return decoder(config, replace(mixer, qk_norm_over_heads=True), dense(config), norms=AFTER)


def olmo3(config: Config) -> ModelSpec:
    """OLMo 3: like OLMo 2, with a sliding window in three of four layers and up to two kinds of RoPE."""
    slide, bias = slides(config, 4), flag(config, "attention_bias")
    kinds = [
        replace(
            attention(_olmo3_rope(config, kind), qkv_bias=bias, o_bias=bias, qk_norm=True, layer_type=kind),
            qk_norm_over_heads=True,
        )
        for kind in ("full_attention", "sliding_attention")
    ]
    windows = windows_of(config, slide, 4096)
    return decoder(config, [kinds[here] for here in slide], dense(config), windows=windows, norms=AFTER)


def _olmo3_rope(config: Config, kind: str) -> Config:
    """Return the RoPE; `rope_scaling` applies only to layers with full attention."""
    if kind == "sliding_attention" and config.get("rope_scaling"):
        return {**config, "rope_scaling": None}
    return {"rope_theta": 500000.0, **config}


def exaone4(config: Config) -> ModelSpec:
    """EXAONE 4: norms after attention and MLP and of heads; with windows, layers without a window have no RoPE."""
    hybrid = config.get("sliding_window") is not None
    slide = slides(config, _exaone_pattern(config) if hybrid else 0)
    mixer = attention(config, qk_norm=True)
    mixers = [replace(mixer, rope=None) if hybrid and not here else mixer for here in slide]
    return decoder(config, mixers, dense(config), windows=windows_of(config, slide), norms=AFTER)


def _exaone_pattern(config: Config) -> int:
    """Return every how many layers attention is full: by a number, or written as local and global layers, "LLLG"."""
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern.endswith("G") and set(pattern[:-1]) == {"L"}:
        return len(pattern)
    return integer(config, "sliding_window_pattern", 4)


def stablelm(config: Config) -> ModelSpec:
    """StableLM 2 and StableLM 3B: LayerNorm, RoPE on a quarter of each head, in 12B norms of each head."""
    mixer = attention(config, qkv_bias=flag(config, "use_qkv_bias"), rotary_factor=0.25)
    mixer = replace(mixer, qk_norm_of_each="separate" if flag(config, "qk_layernorm") else "")
    spec = decoder({"layer_norm_eps": 1e-5, **config}, mixer, dense(config), eps_name="layer_norm_eps")
    spec = with_names(spec, ((".q_layernorm.", ".q_norm."), (".k_layernorm.", ".k_norm.")))
    if flag(config, "use_parallel_residual"):
        norms = Norms(before_mlp="")
        spec = replace(spec, layers=tuple(replace(layer, parallel=True, norms=norms) for layer in spec.layers))
    return replace(spec, norm="layer_bias")


def olmo(config: Config) -> ModelSpec:
    """OLMo of 2024: LayerNorm without weights, limits of projected queries, keys and values."""
    bias = flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, o_bias=bias)
    clip = 0.0 if config.get("clip_qkv") is None else number(config, "clip_qkv")
    spec = decoder(
        {**config, "layer_norm_eps": 1e-5}, replace(mixer, clip=clip), dense(config), eps_name="layer_norm_eps"
    )
    return replace(spec, norm="layer_plain")


def glm(config: Config) -> ModelSpec:
    """GLM-4 of 2024 (glm-4-9b-hf): interleaved RoPE on half of each head; gate and up in one tensor."""
    mixer = attention(config, qkv_bias=flag(config, "attention_bias", True), rotary_factor=0.5, interleaved=True)
    return decoder(config, mixer, dense(config, fused="gate_up_proj"))


def glm4(config: Config) -> ModelSpec:
    """GLM-4-0414: norms before and after each sublayer."""
    spec = glm(config)
    norms = Norms(after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
    return replace(spec, layers=tuple(replace(layer, norms=norms) for layer in spec.layers))


def cohere(config: Config) -> ModelSpec:
    """Command-R and R+: attention and MLP in parallel after one LayerNorm without bias; scaled logits."""
    bias = flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, o_bias=bias, interleaved=True)
    mixer = replace(mixer, qk_norm_of_each="stacked" if flag(config, "use_qk_norm") else "")
    return _cohere(config, decoder(config, mixer, dense(config), eps_name="layer_norm_eps"))


def cohere2(config: Config) -> ModelSpec:
    """Command-R7B and Command A: three of four layers have a sliding window and RoPE, the others neither."""
    slide, bias = slides(config, integer(config, "sliding_window_pattern", 4)), flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, o_bias=bias, interleaved=True)
    mixers = [mixer if here else replace(mixer, rope=None) for here in slide]
    windows = windows_of(config, slide, 4096)
    return _cohere(config, decoder(config, mixers, dense(config), windows=windows, eps_name="layer_norm_eps"))


def starcoder2(config: Config) -> ModelSpec:
    """StarCoder2: LayerNorm, biases, an MLP without a gate."""
    bias = flag(config, "use_bias", True)
    window = 0 if config.get("sliding_window") is None else integer(config, "sliding_window")
    mlp = replace(dense(config, bias=bias, activations=GELU, gated=False), up_name="c_fc", down_name="c_proj")
    mixer = attention(config, window=window, qkv_bias=bias, o_bias=bias)
    spec = decoder(config, mixer, mlp, eps_name="norm_epsilon")
    return replace(spec, norm="layer_bias", tie_word_embeddings=flag(config, "tie_word_embeddings", True))


def nemotron(config: Config) -> ModelSpec:
    """Nemotron and Minitron, dense: LayerNorm with weights stored minus one, a squared-ReLU MLP without a gate."""
    bias = flag(config, "attention_bias")
    mlp = dense(config, bias=flag(config, "mlp_bias"), activations=("relu2",), gated=False)
    spec = decoder(config, attention(config, qkv_bias=bias, o_bias=bias, rotary_factor=0.5), mlp, eps_name="norm_eps")
    return replace(spec, norm="layer_bias", norm_offset=1.0)


def _gemma_attention(config: Config, layer_type: str = "") -> AttentionSpec:
    if config.get("use_bidirectional_attention"):
        raise ModelError("'use_bidirectional_attention' must be false: attention to later tokens is not supported")
    bias = flag(config, "attention_bias")
    return attention({"head_dim": 256, **config}, qkv_bias=bias, o_bias=bias, layer_type=layer_type)


def _gemma(config: Config, spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        norm_offset=1.0,
        embedding_multiplier=math.sqrt(spec.hidden_size),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
    )


def _cohere(config: Config, spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        layers=tuple(replace(layer, parallel=True, norms=Norms(before_mlp="")) for layer in spec.layers),
        norm="layer",
        logits_multiplier=number(config, "logit_scale", 0.0625),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
    )
