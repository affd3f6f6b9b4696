"""Configurations as published: each is read and a few of its layers are built, or it is refused for a reason.

QUIRE_TEST_CONFIGS names a folder of config.json files, in any depth or under any name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.families.missing import A_FUNCTION
from engine.models.spec import ModelSpec
from engine.models.weights import decoder_of_shapes

FOLDER = Path(os.environ.get("QUIRE_TEST_CONFIGS", "/nonexistent"))
LAYERS = 4
# Text models of transformers 5.17 whose default configurations are read; among several hundred of all kinds.
LEAST = 100


def configs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.rglob("*.json")):
        config = json.loads(path.read_text("utf-8-sig"))
        if isinstance(config, dict) and "architectures" in config:
            yield path.relative_to(folder).as_posix(), config


def build(spec: ModelSpec) -> None:
    """Build the first layers and the last, without memory."""
    layers = (*spec.layers[: LAYERS - 1], spec.layers[-1]) if spec.num_layers > LAYERS else spec.layers
    layers = tuple(layer if layer.mixer.kv_of is None else spec.layers[0] for layer in layers)
    decoder_of_shapes(replace(spec, layers=layers), torch.bfloat16, Path("model"))


def refusal(folder: Path, config: dict[str, Any]) -> str | None:
    """Read a configuration and build the model. None: both work."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        build(read_spec(folder))
    except ModelError as error:
        return str(error).removeprefix(f"{folder / 'config.json'}: ")
    return None


@pytest.mark.skipif(not FOLDER.is_dir(), reason="QUIRE_TEST_CONFIGS names no folder")
def test_published_configurations(tmp_path: Path) -> None:
    refused = {name: refusal(tmp_path, config) for name, config in configs(FOLDER)}
    print(f"{list(refused.values()).count(None)} of {len(refused)} configurations are read and built")
    unexplained = [name for name, reason in refused.items() if reason is not None and A_FUNCTION in reason]
    assert not unexplained, "a refusal names what the model needs"
    assert list(refused.values()).count(None) >= 0.7 * len(refused), refused


@pytest.mark.slow
def test_default_configurations_of_transformers(tmp_path: Path) -> None:
    """Those of its classes for text, most of which are those of a published checkpoint."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto import modeling_auto as auto

    transformers.utils.logging.set_verbosity_error()
    names = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    read = []
    for kind, architectures in names.items():
        try:
            config = json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
        except Exception:
            continue
        first = architectures if isinstance(architectures, str) else architectures[0]
        if refusal(tmp_path, config | {"architectures": [first]}) is None:
            read.append(kind)
    assert len(read) >= LEAST, sorted(read)


DEEPSEEK: dict[str, Any] = {
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
PUBLISHED: dict[str, dict[str, Any]] = {  # parts of published files that were refused once
    "DeepSeek-V3.2": DEEPSEEK
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "first_k_dense_replace": 3,
        "index_n_heads": 64,
        "intermediate_size": 18432,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v32",
        "n_group": 8,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "topk_group": 4,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "GLM-5": DEEPSEEK
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "first_k_dense_replace": 3,
        "hidden_size": 6144,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "intermediate_size": 12288,
        "max_position_embeddings": 202752,
        "model_type": "glm_moe_dsa",
        "n_group": 1,
        "num_attention_heads": 64,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "Llama-4-Scout": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {
            "attention_chunk_size": 8192,
            "head_dim": 128,
            "hidden_size": 5120,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 10485760,
            "model_type": "llama4_text",
            "num_attention_heads": 40,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "use_qk_norm": True,
            "vocab_size": 202048,
        },
        "vision_config": {"hidden_size": 1408, "rope_theta": 10000},
    },
    "Qwen2.5-VL": {  # fields of the text model among the others
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vision_config": {"depth": 32, "hidden_size": 1280},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 151936,
    },
    "Qwen3.6-27B-NVFP4": {  # fp8 and nvfp4 by module, and a quantised output head
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": {
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_5_text",
            "num_attention_heads": 24,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "output_gate_type": "swish",
            "partial_rotary_factor": 0.25,
            "vocab_size": 248320,
        },
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 5120,
            "patch_size": 16,
        },
        "quantization_config": {
            "ignore": ["mtp*"],
            "producer": {"name": "modelopt", "version": "0.45.0"},
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "lm_head": {"group_size": 16, "quant_algo": "W4A16_NVFP4"},
                "model.language_model.layers.0.linear_attn.in_proj_qkv": {"quant_algo": "FP8"},
                "model.language_model.layers.0.linear_attn.in_proj_z": {"quant_algo": "FP8"},
                "model.language_model.layers.0.mlp.gate_proj": {"group_size": 16, "quant_algo": "W4A16_NVFP4"},
                "model.language_model.layers.0.mlp.up_proj": {"group_size": 16, "quant_algo": "W4A16_NVFP4"},
            },
            "quant_method": "modelopt",
        },
    },
    "falcon-7b": {
        "alibi": False,
        "architectures": ["FalconForCausalLM"],
        "bias": False,
        "hidden_size": 4544,
        "layer_norm_epsilon": 1e-05,
        "model_type": "falcon",
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "parallel_attn": True,
        "vocab_size": 65024,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parts_of_published_files(name: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, PUBLISHED[name]) is None
