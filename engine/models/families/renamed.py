"""Families with Llama's layers under other names of tensors or fields, whose code comes with the model."""

from __future__ import annotations

import math
from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense, with_names
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.llama_like import llama, qwen2
from engine.models.families.mpt import alibi_slopes
from engine.models.spec import ModelSpec

INTERNLM2 = (
    ("model.tok_embeddings.", "model.embed_tokens."),
    ("^output.", "lm_head."),
    (".attention.wqkv.", ".self_attn.qkv_proj."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
)
EXAONE = (
    ("^transformer.wte.", "model.embed_tokens."),
    ("^transformer.h.", "model.layers."),
    ("^transformer.ln_f.", "model.norm."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".attn.attention.", ".self_attn."),
    (".out_proj.", ".o_proj."),
    (".mlp.c_fc_0.", ".mlp.gate_proj."),
    (".mlp.c_fc_1.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)
CHATGLM = (
    ("^transformer.embedding.word_embeddings.", "model.embed_tokens."),
    ("^transformer.encoder.layers.", "model.layers."),
    ("^transformer.encoder.final_layernorm.", "model.norm."),
    ("^transformer.output_layer.", "lm_head."),
    (".self_attention.query_key_value.", ".self_attn.qkv_proj."),
    (".self_attention.dense.", ".self_attn.o_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.gate_up_proj."),
    (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
)
BAICHUAN = ((".self_attn.W_pack.", ".self_attn.qkv_proj."),)
NORMED_HEAD = 125696  # the vocabulary of Baichuan 2, whose output head is normalised


def internlm(config: Config) -> ModelSpec:
    """InternLM: biases of query, key, value and output."""
    bias = flag(config, "bias", True)
    return decoder(config, attention(config, qkv_bias=bias, o_bias=bias), dense(config))


def internlm2(config: Config) -> ModelSpec:
    """InternLM 2 and 2.5: query, key and value of each KV head in one tensor."""
    bias = flag(config, "bias")
    mixer = attention(config, qkv_bias=bias, o_bias=bias)
    return with_names(decoder(config, replace(mixer, fused=True, grouped=True), dense(config)), INTERNLM2)


def internlm3(config: Config) -> ModelSpec:
    """InternLM 3: biases according to the configuration."""
    bias = flag(config, "bias")
    mixer = attention(config, qkv_bias=flag(config, "qkv_bias"), o_bias=bias)
    return decoder(config, mixer, dense(config, bias=bias))


def exaone(config: Config) -> ModelSpec:
    """EXAONE 3, 3.5 and Deep."""
    layers = integer(config, "num_hidden_layers", config.get("num_layers"))
    activation = config.get("activation_function", "silu")
    config = {"rms_norm_eps": config.get("layer_norm_epsilon", 1e-5), **config, "hidden_act": activation}
    return with_names(llama(config | {"num_hidden_layers": layers}), EXAONE)


def chatglm(config: Config) -> ModelSpec:
    """ChatGLM 2 and 3, GLM-4 as first published: interleaved RoPE on half of each head, fused tensors."""
    for name, value in (("rmsnorm", True), ("post_layer_norm", True), ("add_bias_linear", False)):
        if flag(config, name, value) != value:
            raise ModelError(f"{name!r} must be {str(value).lower()}")
    for name in ("apply_residual_connection_post_layernorm", "pre_seq_len"):
        if config.get(name):
            raise ModelError(f"{name!r} is not supported")
    heads = integer(config, "num_attention_heads")
    usual = {
        **config,
        "num_hidden_layers": integer(config, "num_layers"),
        "num_key_value_heads": integer(config, "multi_query_group_num")
        if flag(config, "multi_query_attention")
        else heads,
        "head_dim": integer(config, "kv_channels"),
        "intermediate_size": integer(config, "ffn_hidden_size"),
        "vocab_size": integer(config, "padded_vocab_size", config.get("vocab_size")),
        "max_position_embeddings": integer(config, "seq_length"),
        "rms_norm_eps": number(config, "layernorm_epsilon", 1e-5),
        "rope_theta": 10000.0 * number(config, "rope_ratio", 1.0),
    }
    mixer = attention(usual, qkv_bias=flag(config, "add_qkv_bias"), rotary_factor=0.5, interleaved=True)
    spec = decoder(usual, replace(mixer, fused=True), dense(usual, fused="gate_up_proj"))
    return with_names(spec, CHATGLM)


def baichuan(config: Config) -> ModelSpec:
    """Baichuan and Baichuan 2: 7B with RoPE, 13B with ALiBi; query, key and value in one tensor."""
    length = integer(config, "max_position_embeddings", config.get("model_max_length"))
    config = {**config, "max_position_embeddings": length}
    mixer = replace(attention(config), fused=True)
    if mixer.num_heads > 32:  # 13B; the files say nothing else of it
        mixer = replace(mixer, rope=None, alibi=alibi_slopes(mixer.num_heads))
    spec = with_names(decoder(config, mixer, dense(config)), BAICHUAN)
    return replace(spec, head_normed=spec.vocab_size == NORMED_HEAD)


def minicpm(config: Config) -> ModelSpec:
    """MiniCPM 1, 2 and 4, dense: multipliers of embeddings, residuals and logits."""
    if config.get("sparse_config") is not None:
        raise ModelError("'sparse_config' is not supported: it needs sparse attention")
    if integer(config, "num_experts", 0, minimum=0):
        raise ModelError("'num_experts' is not supported for MiniCPM")
    spec = llama(config)
    residual = number(config, "scale_depth", 1.0) / math.sqrt(spec.num_layers)
    if config.get("scale_depth") is None:
        residual = 1.0
    base = number(config, "dim_model_base", spec.hidden_size)
    return replace(
        spec,
        layers=tuple(replace(layer, residual_multiplier=residual) for layer in spec.layers),
        embedding_multiplier=number(config, "scale_emb", 1.0),
        logits_multiplier=base / spec.hidden_size,
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
    )


def mimo(config: Config) -> ModelSpec:
    """MiMo-7B: Qwen2's layers; those that predict further tokens are not loaded."""
    return replace(qwen2(config), unused=("mtp_layers.",))


def orion(config: Config) -> ModelSpec:
    """Orion-14B: LayerNorm."""
    return replace(llama(config), norm="layer_bias")
