"""Configurations of models with recurrent layers, see `benchmarks.model_shapes`."""

from __future__ import annotations

from typing import Any

_PLAIN = {"initializer_range": 0.02, "use_cache": True, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}


def _qwen3_5(
    layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, *, tied: bool, **more: Any
) -> dict[str, Any]:
    """A text model of the architecture of Qwen3.5, 3.6 and 3.8."""
    experts = "num_experts" in more
    return {
        **_PLAIN,
        "architectures": ["Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "mamba_ssm_dtype": "float32",
        "attention_bias": False,
        "attn_output_gate": True,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _QWEN_ROPE,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": tied,
        "bos_token_id": 248044,
        "eos_token_id": 248044,
        **more,
    }


def _with_encoder(text: dict[str, Any]) -> dict[str, Any]:
    """The model as it is published, with an encoder of images: vLLM knows no other form. For speed of text, start both
    engines with `language_model_only`.
    """
    architecture = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    model_type = text["model_type"].removesuffix("_text")
    sections = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    vision = {"model_type": model_type, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
    vision |= {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    vision |= {"num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": []}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
        "text_config": text | {"rope_parameters": _QWEN_ROPE | sections},
        "vision_config": vision | {"out_hidden_size": text["hidden_size"], "initializer_range": 0.02},
    }


def _lfm2(layers: list[int], hidden: int, inner: int, heads: int) -> dict[str, Any]:
    """LFM2 and LFM2.5. layers: their number, then those that attend."""
    count, *attends = layers
    return {
        **_PLAIN,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": count,
        "layer_types": ["full_attention" if i in attends else "conv" for i in range(count)],
        "hidden_size": hidden,
        "block_ff_dim": inner,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "tie_embedding": True,
        "bos_token_id": 1,
        "eos_token_id": 7,
    }


_NEMOTRON_3_NANO = {
    **_PLAIN,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": False,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
    "time_step_limit": [0.0, float("inf")],
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "residual_in_fp32": False,
    "rescale_prenorm_residual": True,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

HYBRID_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": _qwen3_5(24, 1024, 8, 2, 16, tied=True, intermediate_size=3584),
    "qwen3.8-27b": _with_encoder(_qwen3_5(64, 5120, 24, 4, 48, tied=False, intermediate_size=17408)),
    "qwen3.6-35b-a3b": _with_encoder(
        _qwen3_5(
            40,
            2048,
            16,
            2,
            32,
            tied=False,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            norm_topk_prob=True,
            router_aux_loss_coef=0.001,
        )
    ),
    "nemotron-3-nano": _NEMOTRON_3_NANO,
    "lfm2-350m": _lfm2([16, 2, 5, 8, 10, 12, 14], 1024, 6656, 16),
}

# As published: the gates, whose rows are fewer than a block's, stay in bfloat16.
_GATES = [
    f"model.language_model.layers.{i}.linear_attn.in_proj_{gate}" for i in range(64) for gate in "ab" if (i + 1) % 4
]
HYBRID_SHAPES["qwen3.8-27b-fp8-block"] = HYBRID_SHAPES["qwen3.8-27b"] | {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.language_model.embed_tokens", "model.visual", *_GATES],
    }
}
