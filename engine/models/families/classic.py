"""Families of 2019 to 2024 with LayerNorm and an MLP without a gate: GPT-2 and its relatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, num_layers, windows_of, with_names
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.mpt import alibi_slopes
from engine.models.quantization import Renames
from engine.models.spec import AttentionSpec, DenseSpec, LearntPositions, ModelSpec, Norms

ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh", "relu"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
ONE_NORM = Norms(before_mlp="")  # of attention and MLP in parallel
GPT = (
    ("^transformer.", ""),
    ("^wte.", "model.embed_tokens."),
    ("^wpe.", "model.embed_positions."),
    ("^h.", "model.layers."),
    ("^ln_f.", "model.norm."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".attn.c_attn.", ".self_attn.qkv_proj."),
    (".attn.c_proj.", ".self_attn.o_proj."),
    (".attn.attention.", ".self_attn."),  # GPT-Neo
    (".attn.", ".self_attn."),  # GPT-J
    (".out_proj.", ".o_proj."),
)
BLOOM = (
    ("^transformer.", ""),
    ("^word_embeddings_layernorm.", "model.embed_norm."),
    ("^word_embeddings.", "model.embed_tokens."),
    ("^h.", "model.layers."),
    ("^ln_f.", "model.norm."),
    (".ln_attn.", ".input_layernorm."),
    (".ln_mlp.", ".post_attention_layernorm."),
    (".self_attention.query_key_value.", ".self_attn.qkv_proj."),
    (".self_attention.dense.", ".self_attn.o_proj."),
)
NEOX = (
    ("^gpt_neox.", "model."),
    ("model.embed_in.", "model.embed_tokens."),
    ("model.final_layer_norm.", "model.norm."),
    ("^embed_out.", "lm_head."),
    (".attention.query_key_value.", ".self_attn.qkv_proj."),
    (".attention.dense.", ".self_attn.o_proj."),
)
OPT = (
    ("^decoder.", "model.decoder."),
    ("^model.decoder.final_layer_norm.", "model.norm."),
    ("^model.decoder.", "model."),
    (".self_attn_layer_norm.", ".input_layernorm."),
    (".final_layer_norm.", ".post_attention_layernorm."),
    (".out_proj.", ".o_proj."),
    (".fc1.", ".mlp.fc1."),
    (".fc2.", ".mlp.fc2."),
)
PHI = (("model.final_layernorm.", "model.norm."), (".self_attn.dense.", ".self_attn.o_proj."))


def gpt2(config: Config) -> ModelSpec:
    """GPT-2, and Cerebras-GPT: learnt positions, matrices stored as [in, out], query, key and value in one tensor."""
    config = _gpt_sizes(config)
    mixer = replace(_without_rope(config, bias=True), fused=True)
    if not flag(config, "scale_attn_weights", True):
        mixer = replace(mixer, scale=1.0)
    divides = flag(config, "scale_attn_by_inverse_layer_idx")
    mixers = [replace(mixer, scale=mixer.scale / (i + 1 if divides else 1)) for i in range(num_layers(config))]
    spec = _layer_norm(config, mixers, _mlp(config, names=("c_fc", "c_proj")), GPT)
    return replace(spec, positions=_positions(config), transposed=True)


def gpt_bigcode(config: Config) -> ModelSpec:
    """StarCoder of 2023 and SantaCoder: like GPT-2, with a single KV head."""
    config = _gpt_sizes(config)
    is_single = flag(config, "multi_query", True)
    mixer = replace(_without_rope(config, bias=True, kv_heads=1 if is_single else 0), fused=True, grouped=not is_single)
    mlp = _mlp(config, names=("c_fc", "c_proj"), default="gelu_pytorch_tanh")
    return replace(_layer_norm(config, mixer, mlp, GPT), positions=_positions(config))


def gpt_neo(config: Config) -> ModelSpec:
    """GPT-Neo and TinyStories: learnt positions, scores without a scale, a sliding window in every other layer."""
    heads, layers = integer(config, "num_heads"), integer(config, "num_layers")
    config = {**config, "num_attention_heads": heads, "num_hidden_layers": layers}
    config["intermediate_size"] = integer(config, "intermediate_size", 4 * integer(config, "hidden_size"))
    kinds = config.get("attention_layers")
    if kinds is None:
        kinds = [kind for kinds, times in config.get("attention_types") or () for _ in range(times) for kind in kinds]
    if len(kinds) != layers or set(kinds) - {"global", "local"}:
        raise ModelError(f"'attention_layers' must be global or local for each of {layers} layers, got {kinds!r}")
    mixer = replace(_without_rope(config, o_bias=True), scale=1.0)
    windows = windows_of({"sliding_window": config.get("window_size")}, [kind == "local" for kind in kinds], 256)
    mixers = [replace(mixer, window=window) for window in windows]
    spec = _layer_norm(config, mixers, _mlp(config, names=("c_fc", "c_proj")), GPT)
    return replace(spec, positions=_positions(config))


def gptj(config: Config) -> ModelSpec:
    """GPT-J: attention and MLP in parallel, interleaved RoPE, a bias of the output head."""
    config = _gpt_sizes(config)
    head_dim = integer(config, "hidden_size") // integer(config, "num_attention_heads")
    factor = integer(config, "rotary_dim", head_dim) / head_dim
    mixer = attention(config, rotary_factor=factor, interleaved=True)
    spec = _layer_norm(config, mixer, _mlp(config, names=("fc_in", "fc_out")), GPT, tied=False)
    return replace(_parallel(spec, ONE_NORM), head_bias=True)


def opt(config: Config) -> ModelSpec:
    """OPT: learnt positions, ReLU."""
    for name, value in (("do_layer_norm_before", True), ("layer_norm_elementwise_affine", True)):
        if flag(config, name, value) != value:
            raise ModelError(f"{name!r} must be true")
    if flag(config, "_remove_final_layer_norm"):
        raise ModelError("'_remove_final_layer_norm' must be false")
    hidden_size = integer(config, "hidden_size")
    if integer(config, "word_embed_proj_dim", hidden_size) != hidden_size:
        raise ModelError(f"'word_embed_proj_dim' must be hidden_size={hidden_size}")
    config = {**config, "intermediate_size": config.get("ffn_dim"), "layer_norm_epsilon": 1e-5}
    bias = flag(config, "enable_bias", True)
    mlp = _mlp(config, names=("fc1", "fc2"), bias=bias, default="relu")
    spec = _layer_norm(config, _without_rope(config, bias=bias), mlp, OPT)
    count = integer(config, "max_position_embeddings")
    return replace(spec, positions=LearntPositions(count=count + 2, offset=2))


def gpt_neox(config: Config) -> ModelSpec:
    """GPT-NeoX, Pythia, Dolly and others: attention and MLP in parallel, with a norm each; partial RoPE."""
    rope = {"rope_theta": config.get("rotary_emb_base", 10000.0)}
    config = rope | config | {"layer_norm_epsilon": config.get("layer_norm_eps", 1e-5), "num_key_value_heads": None}
    bias = flag(config, "attention_bias", True)
    mixer = attention(config, qkv_bias=bias, o_bias=bias, rotary_factor=number(config, "rotary_pct", 0.25))
    mlp = _mlp(config, field="hidden_act", names=("dense_h_to_4h", "dense_4h_to_h"), default="gelu")
    spec = _layer_norm(config, replace(mixer, fused=True, grouped=True), mlp, NEOX, tied=False)
    return _parallel(spec, Norms()) if flag(config, "use_parallel_residual", True) else spec


def phi(config: Config) -> ModelSpec:
    """Phi-1, 1.5 and 2: attention and MLP in parallel, RoPE on part of each head, a bias of the output head."""
    if flag(config, "qk_layernorm"):
        raise ModelError("'qk_layernorm' must be false")
    config = {**config, "layer_norm_epsilon": config.get("layer_norm_eps", 1e-5)}
    mixer = attention(config, qkv_bias=True, o_bias=True, rotary_factor=0.5)
    spec = _layer_norm(config, mixer, _mlp(config, field="hidden_act", names=("fc1", "fc2")), PHI, tied=False)
    return replace(_parallel(spec, ONE_NORM), head_bias=True)


def bloom(config: Config) -> ModelSpec:
    """BLOOM: ALiBi, a norm of the embeddings, query, key and value of each head in one tensor."""
    if flag(config, "apply_residual_connection_post_layernorm"):
        raise ModelError("'apply_residual_connection_post_layernorm' must be false")
    hidden_size = integer(config, "hidden_size", config.get("n_embed"))
    heads = integer(config, "num_attention_heads", config.get("n_head"))
    config = {
        **config,
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_hidden_layers": integer(config, "num_hidden_layers", config.get("n_layer")),
        "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": integer(config, "seq_length", 2048),
    }
    mixer = replace(_without_rope(config, bias=True), alibi=alibi_slopes(heads), fused=True, grouped=True)
    mlp = _mlp(config, names=("dense_h_to_4h", "dense_4h_to_h"))
    return replace(_layer_norm(config, mixer, mlp, BLOOM), embedding_norm="norm")


def falcon(config: Config) -> ModelSpec:
    """Falcon 7B, 40B, 180B, Falcon 2 and Falcon-RW: attention and MLP in parallel, with RoPE; or ALiBi."""
    hidden_size = integer(config, "hidden_size")
    heads = integer(config, "num_attention_heads", config.get("n_head"))
    is_new, is_single = flag(config, "new_decoder_architecture"), flag(config, "multi_query", True)
    kv_heads = 1 if is_single else heads
    if is_new:
        kv_heads = integer(config, "num_kv_heads", integer(config, "n_head_kv", heads))
    config = {
        "max_position_embeddings": 2048,
        **config,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": integer(config, "num_hidden_layers", config.get("n_layer")),
        "intermediate_size": integer(config, "ffn_hidden_size", 4 * hidden_size),
    }
    bias = flag(config, "bias")
    mixer = replace(attention(config, qkv_bias=bias, o_bias=bias), fused=True, grouped=True)
    if flag(config, "alibi"):
        mixer = replace(mixer, rope=None, alibi=tuple(slope * mixer.scale for slope in alibi_slopes(heads)))
    mlp = _mlp(config, field="activation", names=("dense_h_to_4h", "dense_4h_to_h"), bias=bias, default="gelu")
    spec = _layer_norm(config, mixer, mlp, BLOOM)
    if not is_new and not flag(config, "parallel_attn", True):
        return spec
    two = integer(config, "num_ln_in_parallel_attn", 2 if is_new else 1) == 2
    return _parallel(spec, Norms() if two else ONE_NORM)


def _gpt_sizes(config: Config) -> Config:
    """Return config.json with the usual names of its sizes."""
    sizes = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    sizes["max_position_embeddings"] = "n_positions"
    usual = {**config, **{ours: integer(config, theirs) for ours, theirs in sizes.items()}}
    usual["num_key_value_heads"] = usual["num_attention_heads"]
    return usual | {"intermediate_size": integer(config, "n_inner", 4 * usual["hidden_size"])}


def _positions(config: Config) -> LearntPositions:
    return LearntPositions(count=integer(config, "max_position_embeddings"))


def _without_rope(config: Config, *, bias: bool = False, o_bias: bool = False, kv_heads: int = 0) -> AttentionSpec:
    config = {**config, "num_key_value_heads": kv_heads or config["num_attention_heads"]}
    return replace(attention(config, qkv_bias=bias, o_bias=bias or o_bias), rope=None)


def _mlp(
    config: Config,
    *,
    names: tuple[str, str],
    field: str = "activation_function",
    bias: bool = True,
    default: str = "gelu_new",
) -> DenseSpec:
    """Create an MLP without a gate. names: of its matrices; field: of its activation."""
    name = config.get(field) or default
    if name not in ACTIVATIONS:
        raise ModelError(f"{field!r} {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return DenseSpec(
        intermediate_size=integer(config, "intermediate_size"),
        bias=bias,
        activation=ACTIVATIONS[name],
        gated=False,
        up_name=names[0],
        down_name=names[1],
    )


def _layer_norm(
    config: Config, mixer: AttentionSpec | Sequence[AttentionSpec], mlp: DenseSpec, names: Renames, *, tied: bool = True
) -> ModelSpec:
    config = {"layer_norm_epsilon": 1e-5, **config}
    spec = with_names(decoder(config, mixer, mlp, eps_name="layer_norm_epsilon"), names)
    return replace(spec, norm="layer_bias", tie_word_embeddings=flag(config, "tie_word_embeddings", tied))


def _parallel(spec: ModelSpec, norms: Norms) -> ModelSpec:
    """Let attention and MLP of each layer read the stream in parallel."""
    return replace(spec, layers=tuple(replace(layer, parallel=True, norms=norms) for layer in spec.layers))
