"""Every model family against transformers, on small random checkpoints: logits and greedy tokens."""

from __future__ import annotations

import copy
import random
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.families import read_spec
from tests.oracles.paged_runner import Decoded, decode
from tests.support.loaded import load as load_model

VOCAB = 384
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# Parts of configurations.
NONE = {"bos_token_id": None, "eos_token_id": None}
ALTERNATING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.05,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "attention_factor": 1.2,
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [2.0 + i / 4 for i in range(16)],
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "pad_token_id": None,
}
SPARSE = {
    **LATENT,
    "q_lora_rank": 48,
    "first_k_dense_replace": 1,
    **ROUTED,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "index_topk": 16,
    "index_n_heads": 16,
    "index_head_dim": 24,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "pad_token_id": 0,
    "eos_token_id": None,
}
MPT = {"max_seq_len": 256, **NONE}
# name → (transformers' model class without "ForCausalLM", what its configuration adds to SHAPE)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-gqa4-llama3": ("Llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 80},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.2, "beta_fast": 16, "truncate": False}}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "mistral-window": ("Mistral", {"sliding_window": 24, "head_dim": 64}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "qwen3-window": ("Qwen3", {"head_dim": 16, "attention_bias": True, "use_sliding_window": True, **ALTERNATING}),
    "ministral": (
        "Ministral",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "seed_oss": ("SeedOss", {"head_dim": 48, "attention_out_bias": True, "pad_token_id": 0}),
    "granite": ("Granite", {**GRANITE, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.75, "sliding_window": 24}),
    "phi3-long": ("Phi3", {"pad_token_id": 0, "original_max_position_embeddings": 1, "rope_parameters": LONGROPE}),
    "phi3-short": ("Phi3", {"pad_token_id": 0, "original_max_position_embeddings": 256, "rope_parameters": LONGROPE}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 64, "use_bias": True}),
    "helium": ("Helium", {"head_dim": 32, "pad_token_id": 0}),
    "gemma": ("Gemma", {"head_dim": 64, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {"head_dim": 48, "query_pre_attn_scalar": 40, "sliding_window": 24}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 64,
            "query_pre_attn_scalar": 40,
            **ALTERNATING,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": (  # as 31B: heads of two sizes, values that are keys
        "Gemma4",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_moe": (  # as 26B-A4B
        "Gemma4",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4_small": (  # as E2B
        "Gemma4",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            "head_dim": 32,
            "num_hidden_layers": 6,
            "intermediate_size": [192, 192, 192, 192, 256, 256],
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "sliding_window": 24,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 24,
            "vocab_size_per_layer_input": VOCAB,
            "altup_active_idx": 1,
            "laurel_rank": 16,
            "final_logit_softcapping": 30.0,
            "pad_token_id": 0,
            **NONE,
        },
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}),
    "olmo3": ("Olmo3", {**ALTERNATING, "pad_token_id": 0, "eos_token_id": None}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4-window": ("Exaone4", ALTERNATING),
    "glm": ("Glm", {"head_dim": 32, "pad_token_id": 0, "eos_token_id": None}),
    "glm4": ("Glm4", {"head_dim": 32, "pad_token_id": 0, "eos_token_id": None}),
    "cohere": ("Cohere", {"logit_scale": 0.25, "eos_token_id": None}),
    "cohere2": ("Cohere2", {**ALTERNATING, "eos_token_id": None}),
    "starcoder2": ("Starcoder2", NONE),
    "nemotron": ("Nemotron", {"mlp_bias": True}),
    "mpt": ("Mpt", MPT),
    "mpt-six-heads": ("Mpt", {**MPT, "hidden_size": 96, "num_attention_heads": 6}),
    "mixtral": ("Mixtral", {"sliding_window": 24, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": None}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, **GRANITE}),
    "granitemoeshared": ("GraniteMoeShared", {"num_local_experts": 4, "shared_intermediate_size": 80}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "use_qk_norm": True,
            **ROUTED,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**LATENT, "q_lora_rank": 48, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            **ROUTED,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 48,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            **ROUTED,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v32": ("DeepseekV32", SPARSE),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        SPARSE | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "minimax_m2": ("MiniMaxM2", {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, **NONE}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            **ALTERNATING,
            "rope_parameters": {**YARN, "truncate": False},
            "eos_token_id": None,
        },
    ),
}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL_TOWER = TOWER | {"image_size": 28, "patch_size": 14}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
# The text models of checkpoints that read images: name → (transformers' class, its configuration). What `text_config`
# says is added to SHAPE.
WITH_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {"rope_parameters": SECTIONS},
            "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 128, "mlp_ratio": 1},
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": {"rope_parameters": SECTIONS}, "vision_config": QWEN_TOWER},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {"head_dim": 32, "rope_parameters": SECTIONS | {"mrope_interleaved": True}},
            "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {"head_dim": 32, **EXPERTS, "rope_parameters": SECTIONS | {"mrope_interleaved": True}},
            "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
            "vision_config": SMALL_TOWER | {"model_type": "pixtral"},
            "tie_word_embeddings": False,
        },
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {
            "text_config": {"model_type": "qwen3", "head_dim": 32},
            "vision_config": TOWER | {"image_size": [28, 28], "patch_size": [14, 14]},
            "tie_word_embeddings": False,
        },
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        {
            "text_config": {
                "attention_bias": True,
                "pad_token_id": 0,
                "eos_token_id": None,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 3, 3],
                },
            },
            "vision_config": QWEN_TOWER | {"image_size": 28},
        },
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": {
                "attention_bias": True,
                "pad_token_id": 0,
                "eos_token_id": None,
                **ROUTED,
                "n_shared_experts": 2,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 3, 3],
                },
            },
            "vision_config": QWEN_TOWER | {"image_size": 28},
        },
    ),
}
# Further ones, whose text model is one of a case above.
SIGLIP = SMALL_TOWER | {"model_type": "siglip_vision_model"}
MORE_WITH_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_k2.5": (
        "Kimi_K25ForConditionalGeneration",
        {
            "text_config": {
                "model_type": "deepseek_v3",
                **LATENT,
                "q_lora_rank": 48,
                "first_k_dense_replace": 1,
                **ROUTED,
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
            },
            "vision_config": TOWER | {"patch_size": 14},
            "projection_hidden_size": 32,
        },
    ),
    "glm46v": (
        "Glm46VForConditionalGeneration",
        {
            "text_config": WITH_IMAGES["glm4v"][1]["text_config"] | {"model_type": "glm4v_text"},
            "vision_config": QWEN_TOWER | {"image_size": 28, "model_type": "glm4v_vision"},
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "mistral", "sliding_window": None},
            "vision_config": SMALL_TOWER | {"model_type": "pixtral"},
            "vision_feature_layer": -1,
        },
    ),
    "llava_next": (
        "LlavaNextForConditionalGeneration",
        {
            "text_config": {"model_type": "granite", "residual_multiplier": 0.22},
            "vision_config": SIGLIP,
            "image_grid_pinpoints": [[28, 28]],
        },
    ),
    "llava_onevision": (
        "LlavaOnevisionForConditionalGeneration",
        {"text_config": {"model_type": "qwen2"}, "vision_config": SIGLIP, "image_grid_pinpoints": [[28, 28]]},
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        {"text_config": {"model_type": "llama"}, "vision_config": SMALL_TOWER, "pad_token_id": 0},
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {"text_config": {"model_type": "llama"}, "vision_config": SMALL_TOWER, "pad_token_id": 0},
    ),
    "muse_glimmer": (
        "MuseGlimmerForConditionalGeneration",
        {
            "text_config": {
                "head_dim": 32,
                "num_hidden_layers": 4,
                "sliding_window": 24,
                "final_logit_softcapping": 20.0,
                "output_multiplier": 0.2,
                "pad_token_id": 0,
                **NONE,
            },
            "vision_config": TOWER,
            "out_hidden_size": 128,
            "projector_hidden_size": 32,
        },
    ),
    "mllama": (
        "MllamaForConditionalGeneration",
        {
            "text_config": {
                "cross_attention_layers": [1, 3],
                "num_hidden_layers": 5,
                "pad_token_id": 0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 28,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1]],
            },
        },
    ),
    "glm_ocr": (
        "GlmOcrForConditionalGeneration",
        {
            "text_config": {
                "head_dim": 32,
                "pad_token_id": 0,
                "eos_token_id": None,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            },
            "vision_config": QWEN_TOWER | {"image_size": 28},
        },
    ),
    "exaone4_5": (
        "Exaone4_5_ForConditionalGeneration",
        {
            "text_config": {"model_type": "exaone4", **ALTERNATING},
            "vision_config": QWEN_TOWER | {"fullatt_block_indexes": [0]},
        },
    ),
    "lfm2_vl": (
        "Lfm2VlForConditionalGeneration",
        {
            "text_config": {
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention", "conv"],
                "block_auto_adjust_ff_dim": False,
                "eos_token_id": None,
            },
            "vision_config": TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 14},
        },
    ),
    "aya_vision": (
        "AyaVisionForConditionalGeneration",
        {"text_config": {"model_type": "cohere2", "eos_token_id": None, "logit_scale": 1.0}, "vision_config": SIGLIP},
    ),
    "cohere2_vision": (
        "Cohere2VisionForConditionalGeneration",
        {"text_config": {"model_type": "cohere2", "eos_token_id": None, "logit_scale": 1.0}, "vision_config": SIGLIP},
    ),
    "got_ocr2": (
        "GotOcr2ForConditionalGeneration",
        {
            "text_config": {"model_type": "qwen2"},
            "vision_config": {
                "hidden_size": 32,
                "output_channels": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 32,
                "mlp_dim": 32,
                "global_attn_indexes": [0],
                "window_size": 2,
            },
        },
    ),
    "lighton_ocr": (
        "LightOnOcrForConditionalGeneration",
        {
            "text_config": {"model_type": "qwen3", "head_dim": 32},
            "vision_config": SMALL_TOWER | {"model_type": "pixtral", "head_dim": 16},
        },
    ),
    "paddleocr_vl": (
        "PaddleOCRVLForConditionalGeneration",
        {
            "text_config": {"head_dim": 32, "pad_token_id": 0, "rope_parameters": SECTIONS, **NONE},
            "vision_config": SMALL_TOWER,
        },
    ),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        {
            "text_config": {"model_type": "qwen2"},
            "audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32},
        },
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {
            "text_config": {"model_type": "llama"},
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
        },
    ),
}
CASES |= WITH_IMAGES
# Names that transformers writes otherwise than published files have them.
MISNAMED = {  # parts of names that transformers does not turn back into those of published files
    "kimi_k2.5": {
        ".model.blocks.": ".model.layers.",
        "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    },
    "qwen2_audio": {".model.model.": ".model."},
    "voxtral": {".model.model.": ".model."},
}
CASES |= {
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False, **NONE}),
    "lfm2-bias": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_multiple_of": 32,
            "tie_word_embeddings": False,
            "eos_token_id": None,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, **EXPERTS, "eos_token_id": None},
    ),
}
GPT = {"n_embd": 128, "n_head": 4, "n_layer": 3, "n_positions": 256, "n_inner": 192, **NONE}
SCALED_YARN = YARN | {"llama_4_scaling_beta": 0.3}
CASES |= {
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt2-scaled": ("GPT2LMHeadModel", GPT | {"scale_attn_by_inverse_layer_idx": True, "n_inner": None}),
    "gpt_bigcode": ("GPTBigCode", GPT),
    "gpt_bigcode-heads": ("GPTBigCode", GPT | {"multi_query": False}),
    "gpt_neo": (
        "GPTNeo",
        {
            "num_heads": 4,
            "num_layers": 3,
            "attention_types": [[["global", "local"], 1], [["local"], 1]],
            "window_size": 24,
        }
        | NONE,
    ),
    "gptj": ("GPTJ", GPT | {"rotary_dim": 16}),
    "opt": ("OPT", {"ffn_dim": 192, "word_embed_proj_dim": 128, "pad_token_id": 0, **NONE}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5, **NONE}),
    "gpt_neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "hidden_act": "gelu_fast", **NONE}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5, **NONE}),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 3, **NONE}),
    "falcon": ("Falcon", NONE),
    "falcon-two-norms": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, **NONE}),
    "falcon-one-norm": ("Falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, **NONE}),
    # transformers' eager attention adds ALiBi twice
    "falcon-alibi": (
        "Falcon",
        {
            "attn_implementation": "sdpa",
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            **NONE,
        },
    ),
    "stablelm": ("StableLm", {"use_qkv_bias": True, **NONE}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True, **NONE}),
    "olmo": ("Olmo", {"clip_qkv": 0.5, "pad_token_id": 0, **NONE}),
    "arcee": ("Arcee", NONE),
    "cohere-qk-norm": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.25, "eos_token_id": None}),
    "ministral3": ("Ministral3", {"head_dim": 32, "pad_token_id": 0, "rope_parameters": SCALED_YARN}),
    "mistral4": (
        "Mistral4",
        LATENT
        | {
            "q_lora_rank": 48,
            "n_routed_experts": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "rope_parameters": SCALED_YARN,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "intermediate_size": 64,
            "intermediate_size_mlp": 192,
            "head_dim": 32,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1],
            "floor_scale": 32,
            "attention_chunk_size": 256,
        },
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {
            "head_dim": 32,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
        },
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"head_dim": 32, "pad_token_id": 0, "num_experts": 8, "moe_topk": [3, 3, 3]}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "moe_layer_end_index": 2,
            "pad_token_id": 0,
        },
    ),
    "llama-equal-bounds": (  # as Llama 4 Scout
        "Llama",
        {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},
    ),
    "mellum": (
        "Mellum",
        {
            **EXPERTS,
            "head_dim": 32,
            **ALTERNATING,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "solar_open": ("SolarOpen", {"head_dim": 32, "attention_bias": True, **ROUTED, "routed_scaling_factor": 2.5}),
    "laguna": (
        "Laguna",
        {
            **EXPERTS,
            **ALTERNATING,
            "head_dim": 32,
            "num_attention_heads_per_layer": [4, 6, 4],
            "shared_expert_intermediate_size": 80,
            "moe_routed_scaling_factor": 2.5,
            **NONE,
        },
    ),
    "laguna-channels": (
        "Laguna",
        {**EXPERTS, "head_dim": 32, "gating": "per-element", "shared_expert_intermediate_size": 80, **NONE},
    ),
    "afmoe": ("Afmoe", {**EXPERTS, **ALTERNATING, "head_dim": 32, "route_scale": 2.5, "mup_enabled": True}),
    "granite_swa": ("GraniteSWA", {**ALTERNATING, "layer_rope_theta": [10000.0, 0, 10000.0], **GRANITE, **NONE}),
    "hyperclovax": (
        "HyperCLOVAX",
        {
            "embedding_multiplier": 10.0,
            "attention_multiplier": 0.05,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.125,
        }
        | NONE,
    ),
    "youtu": ("Youtu", LATENT | {"q_lora_rank": 48, "rope_interleave": True, **NONE}),
    "vaultgemma": ("VaultGemma", {**ALTERNATING, "head_dim": 48, "query_pre_attn_scalar": 40, **NONE}),
    "cwm": ("Cwm", {**ALTERNATING, "head_dim": 32, "bos_token_id": 1, "eos_token_id": [0]}),
    "hy_v3": ("HYV3", {**EXPERTS, "head_dim": 32, "num_shared_experts": 2}),
    "exaone_moe": (
        "ExaoneMoe",
        {**EXPERTS, "head_dim": 32, **ALTERNATING, "first_k_dense_replace": 1, "eos_token_id": None},
    ),
    "phimoe": (
        "Phimoe",
        {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3, **NONE},
    ),
    "minicpm3": ("MiniCPM3", LATENT | {"q_lora_rank": 48, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64}),
    "dots1": (
        "Dots1",
        {
            **ROUTED,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}
DELTA_NET = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 16,
}
DELTA_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 80}
CASES |= {
    "qwen3_next": ("Qwen3Next", {**DELTA_NET, **DELTA_EXPERTS}),
    "qwen3_5": ("Qwen3_5", {**DELTA_NET, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA_NET, **DELTA_EXPERTS}),
    "qwen3_5_vl": (
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": DELTA_NET
            | {
                "rope_parameters": SECTIONS
                | {"mrope_interleaved": True, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
            },
            "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [], "num_position_embeddings": 16},
        },
    ),
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
    "num_hidden_layers": 4,
    **NONE,
}
MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
GRANITE_HYBRID = MAMBA | {"layer_types": MIXED, "shared_intermediate_size": 80, **GRANITE}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 64,
    "n_groups": 4,
    "head_dim": 32,
    "chunk_size": 32,
    "time_step_min": 1e-12,  # published models limit no step; transformers limits those of prompts alone
    **NONE,
}
CASES |= {
    "nemotron_h": ("NemotronH", NEMOTRON),
    "nemotron_h-moe": (
        "NemotronH",
        NEMOTRON
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
            **ROUTED,
            "moe_shared_expert_intermediate_size": 80,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h-latent": (
        "NemotronH",
        NEMOTRON
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            **ROUTED,
            "moe_shared_expert_intermediate_size": 80,
            "moe_latent_size": 32,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **GRANITE_HYBRID,
            "mamba_n_groups": 1,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
        },
    ),
    "granitemoehybrid-dense": (
        "GraniteMoeHybrid",
        {**GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True},
    ),
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1, 3], "mamba_conv_bias": False}),
    "falcon_h1": (
        "FalconH1",
        MAMBA
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 256,
            "embedding_multiplier": 5.0,
            "lm_head_multiplier": 0.04,
            "key_multiplier": 0.4,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.25,
            "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.36],
            "mlp_multipliers": [0.88, 0.18],
        },
    ),
    "falcon_h1-norm": (
        "FalconH1",
        MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 256, "mamba_rms_norm": True, "projectors_bias": True},
    ),
}
CASES |= {
    "kimi_linear": (
        "KimiLinear",
        LATENT
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_group": 2,
            "topk_group": 1,
            **NONE,
        },
    )
}
ATTENTION = "eager"  # the one that has soft caps
PROMPT_LENGTHS = (1, 13, 70, 33)  # one beyond the window; within 80, where the dynamic case begins to stretch
NUM_TOKENS = 14  # from 13 beyond the window, from 70 beyond 80
STEPWISE = {"llama-dynamic"}  # cases whose keys depend on the length that the sequence had when they were computed
MAX_ERROR, MAX_RATIO = 1e-4, 1.5


def make_checkpoint(name: str, folder: Path, shape: dict[str, Any] | None = None, **save_options: Any) -> Any:
    """The random transformers model of a case, in float32 on the CPU, also saved in `folder`. Logits are about 1.

    `shape`: changes to the case's configuration.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    family, changes = (CASES | MORE_WITH_IMAGES)[name]
    torch.manual_seed(sum(map(ord, name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # GPTBigCode's module uses torch.jit
        named = family.endswith(("Generation", "Model"))
        model_class = getattr(transformers, family if named else f"{family}ForCausalLM")
    changes = copy.deepcopy({**changes, **(shape or {})})  # transformers writes into its objects
    if (text := changes.get("text_config")) is not None:
        whole = {name: value for name, value in changes.items() if name not in SHAPE}
        changes = whole | {"text_config": {**SHAPE, **text, **(shape or {})}}
    else:
        changes = SHAPE | changes
    config = model_class.config_class(**{"attn_implementation": ATTENTION, **changes})
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.normal_(1.0, 0.2)
                if family.startswith(("Qwen3Next", "Qwen3_5")) and "linear_attn" not in parameter_name:
                    parameter.sub_(1)  # of these, 1 + w is used
                if family in ("Gemma3n", "Gemma4") and "q_norm" in parameter_name:
                    parameter.mul_(len(parameter) ** -0.5)  # it has learnt the scale of its scores
            else:
                parameter.normal_(0.0, 0.2 if parameter.dim() == 1 else parameter.shape[1] ** -0.5)
        for buffer_name, buffer in model.named_buffers():
            if "correction" in buffer_name or "expert_bias" in buffer_name:
                buffer.normal_(0.0, 0.2)
            if "layer_scalar" in buffer_name:
                buffer.normal_(0.8, 0.2)
    model.save_pretrained(folder, **save_options)
    if name in MISNAMED:
        rename_tensors(folder, MISNAMED[name])
    return model


def rename_tensors(folder: Path, parts: Mapping[str, str]) -> None:
    """Replace parts of names in the checkpoint's one file."""
    file, tensors = folder / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        for theirs, ours in parts.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})


@torch.inference_mode()
def transformers_decode(model: Any, prompt: list[int], num_tokens: int, forced: list[int] | None = None) -> Decoded:
    """The same by transformers, alone and token by token over its own cache."""
    tokens: list[int] = []
    rows: list[Tensor] = []
    inputs, cache, start = prompt, None, 0
    while True:
        ids = torch.tensor([inputs], device=model.device)
        more = {}
        if model.config.model_type == "bamba":  # without them, it begins at 0 in each call
            more = {"position_ids": torch.arange(start, start + len(inputs), device=model.device)[None]}
        output, start = model(ids, past_key_values=cache, use_cache=True, **more), start + len(inputs)
        cache = output.past_key_values
        rows.append(output.logits[0])
        tokens.append(forced[len(tokens)] if forced else int(rows[-1][-1].argmax()))
        if len(tokens) == num_tokens:
            return Decoded(tokens, torch.cat(rows))
        inputs = tokens[-1:]


def make_prompts() -> list[list[int]]:
    shuffle = random.Random(1)
    return [[shuffle.randrange(VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]


@torch.inference_mode()
def transformers_logits(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return logits [len(prompt) + len(tokens) - 1, vocab] of a prompt and its continuation, alone and in one pass."""
    return model(torch.tensor([[*prompt, *tokens[:-1]]], device=model.device), use_cache=False).logits[0]


def transformers_tokens(model: Any, folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the greedy tokens of transformers: those that our decoder guesses where transformers chooses each of them
    in one pass, else what it chooses token by token.

    model: saved in `folder`.
    """
    ours = load_model(folder, read_spec(folder), max_model_len=max(map(len, prompts)) + num_tokens)
    found = []
    for prompt, guessed in zip(prompts, decode(ours, prompts, num_tokens), strict=True):
        tokens = transformers_logits(model, prompt, guessed.token_ids)[-num_tokens:].argmax(-1).tolist()
        if tokens != guessed.token_ids:
            tokens = []
            while len(tokens) < num_tokens:
                tokens.append(int(transformers_logits(model, prompt, [*tokens, 0])[-1].argmax()))
        found.append(tokens)
    return found


def check_family(name: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """One case on `device` in `dtype`, ragged prompts in one batch, whole and chunked, against transformers in float32.

    All are fed the tokens that our model chooses when prompts are whole.

    error, transformers_error: relative RMS of the logits' error, ours and that of transformers in the same dtype.
    max_error: our largest absolute one. greedy_equal: transformers in float32 chooses each of the tokens, too.
    """
    prompts = make_prompts()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        theirs = model32 = make_checkpoint(name, folder).to(device)
        if dtype is not torch.float32:
            theirs = type(model32).from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION).to(device)
        model = load_model(folder, read_spec(folder), dtype=dtype, device=device, max_model_len=256)
    whole = decode(model, prompts, NUM_TOKENS, block_size=64, expands=True)
    tokens = [each.token_ids for each in whole]
    runs = [whole, decode(model, prompts, NUM_TOKENS, chunk=11, forced=tokens)]

    def answers(oracle: Any) -> list[Decoded]:
        fed = list(zip(prompts, tokens, strict=True))
        if name in STEPWISE:
            logits = [transformers_decode(oracle, each, NUM_TOKENS, forced).logits for each, forced in fed]
        else:
            logits = [transformers_logits(oracle, each, forced) for each, forced in fed]
        return [Decoded(each[-NUM_TOKENS:].argmax(-1).tolist(), each) for each in logits]

    expected = answers(model32)
    return {
        "error": max(_relative_error(run, expected) for run in runs),
        "transformers_error": _relative_error(answers(theirs), expected),
        "max_error": max((_joined(run) - _joined(expected)).abs().max().item() for run in runs),
        "greedy_equal": [each.token_ids for each in expected] == tokens,
    }


def _joined(decoded: list[Decoded]) -> Tensor:
    return torch.cat([d.logits for d in decoded]).float()


def _relative_error(decoded: list[Decoded], expected: list[Decoded]) -> float:
    want = _joined(expected)
    return ((_joined(decoded) - want).norm() / want.norm()).item()


def passes(result: dict[str, Any], dtype: torch.dtype) -> bool:
    """float32: logits within MAX_ERROR and equal greedy tokens. Else: an error of at most MAX_RATIO times transformers'
    own.
    """
    if dtype is torch.float32:
        return result["max_error"] <= MAX_ERROR and result["greedy_equal"]
    return result["error"] <= MAX_RATIO * result["transformers_error"]
