"""Converts the metadata of GGUF files to config.json: one short function for each architecture.

GGUF names a tensor `blk.3.attn_q.weight`; an `Architecture` holds the checkpoint's names of these parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

from engine.models.errors import ModelError

LAYER = "model.layers.{}."
OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",  # of LFM2's outputs
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
MAMBA2 = {
    "ssm_a": "mamba.A_log",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_d": "mamba.D",
    "ssm_dt": "mamba.dt_bias",
    "ssm_in": "mamba.in_proj",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
NEMOTRON_H = {
    **{ours: f"mixer.{name.partition('.')[2]}" for ours, name in MAMBA2.items()},
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
    "attn_output": "mixer.o_proj",
    **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_EMBEDDING = {
    "inp_gate": "per_layer_input_gate",
    "post_norm": "post_per_layer_input_norm",
    "proj": "per_layer_projection",
}
GEMMA3N = {
    **GEMMA,
    **LAYER_EMBEDDING,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "laurel_r": "laurel.linear_right",
}
GEMMA4 = {
    **GEMMA,
    **LAYER_EMBEDDING,
    **{f"ffn_{part}_exps": f"experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "layer_output_scale": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
}
PLAIN_NORMS = ("ssm_norm",)
# Tensors that config.json holds instead.
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs", "rope_factors_long", "rope_factors_short"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one model: metadata under its architecture's name, tensors, and RoPE factors."""

    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]  # of tensors by their names in the file
    factors: Mapping[str, list[float]] = field(default_factory=dict)  # by `ROPE_FACTORS` and the others

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a setting that is one number, or the same one for each layer. Raises `ModelError`."""
        value = self.get(name, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.architecture}.{name} must be one integer for all layers, got {value!r:.60}")
        return value

    def integers(self, name: str) -> list[int]:
        """Return a setting that is one number, or one for each layer: one for each. Raises `ModelError`."""
        value, count = self.get(name), self.integer("block_count")
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count or not all(isinstance(each, int) for each in values):
            raise ModelError(f"{self.architecture}.{name} must be integers for {count} layers, got {value!r:.60}")
        return values

    def size(self, name: str, dimension: int) -> int:
        """Return a dimension of a tensor. Raises `ModelError` if there is none."""
        shape = self.shapes.get(name, ())
        if len(shape) <= dimension:
            raise ModelError(f"it has no {name} of {dimension + 1} dimensions; download it again")
        return shape[dimension]

    @property
    def head_dim(self) -> int:
        heads = max(self.integer("attention.head_count"), 1)
        return self.integer("attention.key_length", self.integer("embedding_length") // heads)

    def has(self, part: str, layer: int = 0) -> bool:
        """Return whether a layer has a tensor."""
        return f"blk.{layer}.{part}" in self.shapes

    def any_has(self, part: str) -> bool:
        """Return whether some layer has a tensor."""
        return any(self.has(part, layer) for layer in range(self.integer("block_count")))


Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of GGUF files."""

    name: str  # in config.json
    config: Callable[[Settings], Config]  # returns fields beside the common ones
    names: Mapping[str, str] = field(default_factory=dict)  # beside `NAMES`
    permutes: bool = False  # rows of q and k are permuted for interleaved RoPE
    norm_offset: float = 0.0  # added to norms in the file, but not to those of `PLAIN_NORMS`
    skips_drafts: bool = False  # layers after the model's are not read

    def part_name(self, part: str) -> str | None:
        """Return a layer part's name below the layer; None if there is no such part."""
        return self.names.get(part, NAMES.get(part))


def find_architecture(settings: Settings) -> Architecture:
    """Return the architecture of a file. Raises `ModelError`."""
    name = settings.architecture
    if name not in ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}; "
            "or give the original model's folder or Hub name"
        )
    if name == "llama" and settings.get("expert_count", 0):
        return MIXTRAL_ARCHITECTURE
    return ARCHITECTURES[name]


def config_json(settings: Settings) -> Config:
    """Return the content of config.json. Raises `ModelError`, which names the setting."""
    of = find_architecture(settings)
    if "token_embd.weight" not in settings.shapes:
        raise ModelError("it has no token_embd.weight: is it a vocabulary or an adapter? give the model's file")
    heads, hidden = settings.integer("attention.head_count"), settings.integer("embedding_length")
    head_dim = settings.head_dim
    if settings.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{settings.architecture}.attention.value_length must equal attention.key_length")
    drafts, own = settings.integer("nextn_predict_layers", 0), of.config(settings)
    config: Config = {
        "architectures": [of.name],
        "hidden_size": hidden,
        "intermediate_size": own.get("intermediate_size")
        or settings.integer("feed_forward_length", 0)
        or hidden,  # 0 or absent: experts alone
        "num_hidden_layers": settings.integer("block_count") - drafts,
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("num_key_value_heads") or _num_kv_heads(settings, heads),
        "head_dim": head_dim,
        "vocab_size": settings.size("token_embd.weight", 0),
        "max_position_embeddings": settings.integer("context_length"),
        "rms_norm_eps": settings.get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": settings.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(settings),
        "tie_word_embeddings": "output.weight" not in settings.shapes,
        "num_nextn_predict_layers": drafts,
    }
    rotary = settings.integer("rope.dimension_count", head_dim)
    if rotary != head_dim and head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    return config | own


def _num_kv_heads(settings: Settings, heads: int) -> int:
    """Return the number of KV heads of layers that attend; recurrent layers have 0."""
    counts = settings.get("attention.head_count_kv")
    if isinstance(counts, list) and len(attending := {count for count in counts if count != 0}) == 1:
        return int(attending.pop())
    return settings.integer("attention.head_count_kv", heads)


def _rope_scaling(settings: Settings) -> Config | None:
    kind, context = settings.get("rope.scaling.type"), settings.integer("context_length")
    original = settings.get("rope.scaling.original_context_length") or context
    if ROPE_FACTORS in settings.factors:  # Llama 3's scaling: a factor of each wavelength
        same = settings.factors[ROPE_FACTORS]
        return _longrope(same, same, 1.0, original)
    if LONG_FACTORS in settings.factors and SHORT_FACTORS in settings.factors:
        long, short = settings.factors[LONG_FACTORS], settings.factors[SHORT_FACTORS]
        return _longrope(short, long, settings.get("rope.scaling.attn_factor", 1.0), original)
    factor = settings.get("rope.scaling.factor") or settings.get("rope.scale_linear")
    if kind == "linear" or (kind is None and factor):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for ours, theirs in {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}.items():
            if (value := settings.get(f"rope.scaling.{theirs}")) is not None:
                scaling[ours] = value
        return scaling
    if kind not in (None, "none"):
        raise ModelError(f"{settings.architecture}.rope.scaling.type {kind!r} is not supported")
    return None


def _longrope(short: list[float], long: list[float], attention_factor: float, original: int) -> Config:
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": original,
    }


def _llama(settings: Settings) -> Config:
    """Llama and Mistral."""
    return {"attention_bias": settings.has("attn_q.bias"), "mlp_bias": settings.has("ffn_gate.bias")}


def _mixtral(settings: Settings) -> Config:
    return {"num_local_experts": settings.integer("expert_count"), **_chosen(settings)}


def _chosen(settings: Settings) -> Config:
    return {"num_experts_per_tok": settings.integer("expert_used_count")}


def _qwen2(settings: Settings) -> Config:
    return {}


def _moe(settings: Settings) -> Config:
    size = settings.get("expert_feed_forward_length") or settings.size("blk.0.ffn_gate_exps.weight", 1)
    return {"num_experts": settings.integer("expert_count"), "moe_intermediate_size": size, **_chosen(settings)}


def _qwen2_moe(settings: Settings) -> Config:
    size = settings.shapes.get("blk.0.ffn_gate_shexp.weight", (0,))[0]
    size = settings.get("expert_shared_feed_forward_length", size)
    return {**_moe(settings), "shared_expert_intermediate_size": size, "norm_topk_prob": False}


def _qwen3(settings: Settings) -> Config:
    return {"attention_bias": settings.has("attn_q.bias")}


def _qwen3_moe(settings: Settings) -> Config:
    return {**_moe(settings), **_qwen3(settings), "norm_topk_prob": True}


def _gemma(settings: Settings) -> Config:
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(settings: Settings) -> Config:
    hidden, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    is_27b = settings.integer("block_count") == 46
    return {
        **_gemma(settings),
        "sliding_window": settings.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": settings.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": hidden // max(heads, 1) if is_27b else settings.head_dim,
    }


def _gemma3(settings: Settings) -> Config:
    hidden, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    is_27b = settings.integer("block_count") == 62
    return {
        **_gemma(settings),
        "sliding_window": settings.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": hidden // max(heads, 1) if is_27b else settings.head_dim,
        "rope_theta": settings.get("rope.freq_base", 1e6),
        "rope_local_base_freq": settings.get("rope.freq_base_swa", 1e4),
    }


def _gemma4(settings: Settings) -> Config:
    count = settings.integer("block_count")
    slides = settings.get("attention.sliding_window_pattern")
    if not isinstance(slides, list) or len(slides) != count or all(slides):
        raise ModelError(
            "gemma4.attention.sliding_window_pattern must be a list that names a layer with full attention"
        )
    kv_heads, sizes = settings.integers("attention.head_count_kv"), settings.integers("feed_forward_length")
    full = slides.index(False)
    window = slides.index(True) if any(slides) else full
    rotating = [factor for factor in settings.factors.get(ROPE_FACTORS, []) if factor < 1e29]
    head_dim = settings.head_dim
    ropes = {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * len(rotating) / max(head_dim, 1) or 1.0,
            "rope_theta": settings.get("rope.freq_base", 1e6),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": settings.get("rope.freq_base_swa", 1e4)},
    }
    per_layer = settings.integer("embedding_length_per_layer_input", 0)
    return {
        **_gemma(settings),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "sliding_window": settings.integer("attention.sliding_window"),
        "head_dim": settings.integer("attention.key_length_swa"),
        "global_head_dim": head_dim,
        "num_key_value_heads": kv_heads[window],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": not settings.has("attn_v.weight", full),
        "num_kv_shared_layers": settings.integer("attention.shared_kv_layers", 0),
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": max(sizes) > min(sizes),
        "hidden_size_per_layer_input": per_layer,
        **({"vocab_size_per_layer_input": settings.size("per_layer_token_embd.weight", 0)} if per_layer else {}),
        "final_logit_softcapping": settings.get("final_logit_softcapping"),
        "rope_parameters": ropes,
        "rope_scaling": None,
        **(_experts_of_gemma4(settings) if settings.get("expert_count", 0) else {}),
    }


def _gemma3n(settings: Settings) -> Config:
    count = settings.integer("block_count")
    slides, scales = settings.get("attention.sliding_window_pattern"), settings.get("activation_sparsity_scale")
    for name, values in (("attention.sliding_window_pattern", slides), ("activation_sparsity_scale", scales)):
        if not isinstance(values, list) or len(values) != count:
            raise ModelError(f"gemma3n.{name} must be a list of {count} values, got {values!r:.60}")
    return {
        **_gemma(settings),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "sliding_window": settings.integer("attention.sliding_window"),
        "intermediate_size": settings.integers("feed_forward_length"),
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        "num_kv_shared_layers": settings.integer("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": settings.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": settings.size("per_layer_token_embd.weight", 0),
        "final_logit_softcapping": settings.get("final_logit_softcapping", 30.0),
        "altup_num_inputs": settings.integer("altup.num_inputs"),
        "altup_active_idx": settings.integer("altup.active_idx"),
        "altup_correct_scale": settings.has("altup_correct_scale.weight"),
        "laurel_rank": settings.size("blk.0.laurel_l.weight", 0),
        "rope_theta": settings.get("rope.freq_base", 1e6),
        "rope_local_base_freq": settings.get("rope.freq_base_swa", 1e4),
    }


def _experts_of_gemma4(settings: Settings) -> Config:
    return {
        "enable_moe_block": True,
        "separate_experts": True,
        "num_experts": settings.integer("expert_count"),
        "top_k_experts": settings.integer("expert_used_count"),
        "moe_intermediate_size": settings.integer("expert_feed_forward_length"),
    }


def _phi3(settings: Settings) -> Config:
    return {"sliding_window": settings.integer("attention.sliding_window", 0) or None}


def _gpt_oss(settings: Settings) -> Config:
    scaling = _rope_scaling(settings)
    return {
        **_mixtral(settings),
        "intermediate_size": settings.size("blk.0.ffn_gate_exps.weight", 1),
        "sliding_window": settings.integer("attention.sliding_window", 128),
        "attention_bias": settings.has("attn_q.bias"),
        "rope_scaling": None if scaling is None else {**scaling, "truncate": False},
        "separate_experts": True,
    }


def _glm4(settings: Settings) -> Config:
    return {"attention_bias": settings.has("attn_q.bias")}


def _granite(settings: Settings) -> Config:
    fields = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    own_scale = settings.head_dim**-0.5 if settings.head_dim else 1.0
    multipliers = {ours: settings.get(theirs, 1.0) for ours, theirs in fields.items()}
    return {
        **_llama(settings),
        **multipliers,
        "attention_multiplier": settings.get("attention.scale") or own_scale,
    }


def _granite_moe(settings: Settings) -> Config:
    return {
        **_granite(settings),
        **_mixtral(settings),
        "shared_intermediate_size": settings.get("expert_shared_feed_forward_length", 0),
        "separate_experts": True,
    }


def _mamba2(settings: Settings) -> Config:
    heads = max(settings.integer("ssm.time_step_rank"), 1)
    return {
        "mamba_n_heads": heads,
        "mamba_num_heads": heads,
        "mamba_d_head": settings.integer("ssm.inner_size") // heads,
        "mamba_n_groups": settings.integer("ssm.group_count"),
        "n_groups": settings.integer("ssm.group_count"),
        "mamba_d_state": settings.integer("ssm.state_size"),
        "mamba_d_conv": settings.integer("ssm.conv_kernel"),
        "mamba_d_ssm": settings.integer("ssm.inner_size"),
        "mamba_conv_bias": settings.any_has("ssm_conv1d.bias"),
        "mamba_proj_bias": settings.any_has("ssm_in.bias"),
    }


def _granite_hybrid(settings: Settings) -> Config:
    has_experts = settings.get("expert_count", 0) > 0
    size = settings.size(f"blk.0.ffn_gate{'_shexp' if has_experts else ''}.weight", 0)
    is_state = [settings.has("ssm_in.weight", layer) for layer in range(settings.integer("block_count"))]
    return {
        **(_granite_moe(settings) if has_experts else _granite(settings)),
        **_mamba2(settings),
        "num_local_experts": settings.integer("expert_count", 0),
        "shared_intermediate_size": size,
        "separate_experts": True,
        "layer_types": ["mamba" if each else "attention" for each in is_state],
        "position_embedding_type": "rope" if settings.get("rope.scaling.finetuned", True) else "nope",
        "attention_bias": settings.any_has("attn_q.bias"),
    }


_PARTS_OF_NEMOTRON = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}


def _nemotron_h(settings: Settings) -> Config:
    kinds = []
    for layer in range(settings.integer("block_count") - settings.integer("nextn_predict_layers", 0)):
        found = [kind for part, kind in _PARTS_OF_NEMOTRON.items() if settings.has(f"{part}.weight", layer)]
        if not found:
            raise ModelError(f"its layer {layer} has neither of {', '.join(_PARTS_OF_NEMOTRON)}; download it again")
        kinds.append(found[0])
    eps = settings.get("attention.layer_norm_rms_epsilon", settings.get("attention.layer_norm_epsilon", 1e-5))
    return {
        **_mamba2(settings),
        "layers_block_type": kinds,
        "layer_norm_epsilon": eps,
        "rms_norm_eps": eps,
        "intermediate_size": max(settings.integers("feed_forward_length")),
        "attention_bias": settings.any_has("attn_q.bias"),
        "mlp_bias": settings.any_has("ffn_up.bias"),
    }


def _nemotron_h_moe(settings: Settings) -> Config:
    size = settings.integer("expert_feed_forward_length")
    latent = settings.integer("moe_latent_size", 0)
    return {
        **_nemotron_h(settings),
        "n_routed_experts": settings.integer("expert_count"),
        **_chosen(settings),
        "moe_intermediate_size": size,
        "moe_shared_expert_intermediate_size": settings.integer("expert_shared_feed_forward_length", size),
        "n_shared_experts": 1,
        "norm_topk_prob": settings.get("expert_weights_norm", True),
        "routed_scaling_factor": settings.get("expert_weights_scale", 1.0),
        "n_group": settings.integer("expert_group_count", 1),
        "topk_group": settings.integer("expert_group_used_count", 1),
        **({"moe_latent_size": latent} if latent else {}),
    }


def _smollm3(settings: Settings) -> Config:
    return {**_llama(settings), "no_rope_layer_interval": 4}


def _lfm2(settings: Settings) -> Config:
    counts = settings.get("attention.head_count_kv")
    return {
        "norm_eps": settings.get("attention.layer_norm_rms_epsilon", 1e-5),
        "conv_L_cache": settings.integer("shortconv.l_cache"),
        "conv_bias": settings.has("shortconv.in_proj.bias"),
        "block_ff_dim": settings.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [i for i, count in enumerate(counts) if count] if isinstance(counts, list) else None,
    }


def _lfm2_moe(settings: Settings) -> Config:
    return {**_moe(settings), **_lfm2(settings), "num_dense_layers": settings.integer("leading_dense_block_count")}


def _qwen3_next(settings: Settings) -> Config:
    has_qkvz = settings.any_has("ssm_in.weight")
    return {**_qwen35_moe(settings), "delta_net_parts": "fused" if has_qkvz else "gates"}


def _qwen35(settings: Settings) -> Config:
    count, values = settings.integer("block_count"), max(settings.integer("ssm.time_step_rank"), 1)
    num_layers = count - settings.integer("nextn_predict_layers", 0)
    is_net = [f"blk.{layer}.ssm_a" in settings.shapes for layer in range(num_layers)]
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in is_net],
        "linear_conv_kernel_dim": settings.integer("ssm.conv_kernel"),
        "linear_key_head_dim": settings.integer("ssm.state_size"),
        "linear_num_key_heads": settings.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": settings.integer("ssm.inner_size") // values,
        "delta_net_parts": "tiled",
        "num_nextn_predict_layers": 0,
    }


def _qwen35_moe(settings: Settings) -> Config:
    return {**_qwen2_moe(settings), **_qwen35(settings), "norm_topk_prob": True}


_FUSED = {"ffn_up": "mlp.gate_up_proj"}
_LLAMA = Architecture("LlamaForCausalLM", _llama, permutes=True)
_GEMMA2 = Architecture("Gemma2ForCausalLM", _gemma2, GEMMA, norm_offset=1.0)
_NEMOTRON_H = Architecture("NemotronHForCausalLM", _nemotron_h, NEMOTRON_H, skips_drafts=True)
MIXTRAL_ARCHITECTURE = Architecture("MixtralForCausalLM", _mixtral, MIXTRAL, permutes=True)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "qwen2": Architecture("Qwen2ForCausalLM", _qwen2),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3": Architecture("Qwen3ForCausalLM", _qwen3),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen35": Architecture("Qwen3_5ForCausalLM", _qwen35, DELTA_NET, norm_offset=1.0, skips_drafts=True),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", _qwen35_moe, DELTA_NET, norm_offset=1.0, skips_drafts=True),
    "qwen3next": Architecture("Qwen3NextForCausalLM", _qwen3_next, DELTA_NET, norm_offset=1.0, skips_drafts=True),
    "gemma": Architecture("GemmaForCausalLM", _gemma, norm_offset=1.0),
    "gemma2": _GEMMA2,
    "gemma3": replace(_GEMMA2, name="Gemma3ForCausalLM", config=_gemma3),
    "gemma3n": Architecture("Gemma3nForCausalLM", _gemma3n, GEMMA3N),
    "gemma4": Architecture("Gemma4ForCausalLM", _gemma4, GEMMA4),
    "phi3": Architecture("Phi3ForCausalLM", _phi3, _FUSED),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _gpt_oss,
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        _glm4,
        {
            **_FUSED,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "granite": replace(_LLAMA, name="GraniteForCausalLM", config=_granite),
    "granitemoe": replace(_LLAMA, name="GraniteMoeSharedForCausalLM", config=_granite_moe),
    "granitehybrid": replace(_LLAMA, name="GraniteMoeHybridForCausalLM", config=_granite_hybrid, names=MAMBA2),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(_NEMOTRON_H, config=_nemotron_h_moe),
    "lfm2": Architecture("Lfm2ForCausalLM", _lfm2, LFM2),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", _lfm2_moe, LFM2),
    "smollm3": replace(_LLAMA, name="SmolLM3ForCausalLM", config=_smollm3),
}
