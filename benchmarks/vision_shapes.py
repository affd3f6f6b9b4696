"""Configurations of models that read images, see `benchmarks.model_shapes`, and what stands beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SPECIAL = {  # by fields of config.json
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
_IDS = dict(zip(_SPECIAL, (151652, 151653, 151655, 151656), strict=True))
_MEAN = [0.5, 0.5, 0.5]
_PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": _MEAN, "image_std": _MEAN}
IMAGE_PROCESSOR = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    **_PATCHES,
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
VIDEO_PROCESSOR = {
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    **_PATCHES,
    "processor_class": "Qwen3VLProcessor",
    "video_processor_type": "Qwen3VLVideoProcessor",
}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ message['role'] }}:
{%- if message['content'] is string %}{{ message['content'] }}{% else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' or 'video' in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part['text'] }}{% endif -%}
{%- endfor -%}
{%- endif %}
{% endfor -%}
{%- if add_generation_prompt %}assistant:{% endif -%}
"""


def _qwen3_vl(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    common = {"dtype": "bfloat16", "initializer_range": 0.02, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    common |= {"attention_bias": False, "attention_dropout": 0.0, "use_cache": True, "max_position_embeddings": 262144}
    common |= {"bos_token_id": 151643, "eos_token_id": 151645, "vocab_size": 151936, "head_dim": 128}
    fixed: dict[str, Any] = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    fixed |= {"num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.02}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **_IDS,
        "text_config": {
            "model_type": "qwen3_vl_text", **common, "rope_theta": 5000000.0, "rope_scaling": rope, **text,
        },
        "vision_config": {"model_type": "qwen3_vl", **fixed, "out_hidden_size": text["hidden_size"], **vision},
    }  # fmt: skip


VISION_SHAPES = {
    "qwen3-vl-8b": _qwen3_vl(
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "depth": 27,
            "num_heads": 16,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    "qwen3-vl-tiny": _qwen3_vl(  # no published model: for tests of benchmarks
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "depth": 4,
            "num_heads": 2,
            "deepstack_visual_indexes": [0, 2],
        },
    ),
}


def special_tokens(config: dict[str, Any]) -> dict[str, int]:
    """Return the tokens of images and videos by their texts: those that a config.json names."""
    return {text: config[field] for field, text in _SPECIAL.items() if field in config}


def add_processor(folder: Path) -> None:
    """Write the chat template and the processors of images and videos, as published models have them."""
    for name, content in (("preprocessor_config", IMAGE_PROCESSOR), ("video_preprocessor_config", VIDEO_PROCESSOR)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
