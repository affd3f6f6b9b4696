"""Image encoders of multimodal checkpoints, from the `vision_config` of their config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from engine.models.errors import ModelError
from engine.models.families.fields import Config, integer
from engine.models.spec import VisionSpec

ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
}


def qwen3_vl(config: Config, text: Config) -> VisionSpec:
    """Qwen3-VL, Qwen3.5, 3.6 and 3.8. Only Qwen3-VL has deepstack."""
    fields = config.get("vision_config")
    if not isinstance(fields, dict):
        raise ModelError(f"'vision_config' must be an object, got {fields!r}")
    if integer(fields, "temporal_patch_size", 2) != 2 or integer(fields, "in_channels", 3) != 3:
        raise ModelError("'vision_config': patches must have 2 frames of 3 channels")
    activation = fields.get("hidden_act") or "gelu_pytorch_tanh"
    if activation not in ACTIVATIONS:
        raise ModelError(f"'vision_config': 'hidden_act' {activation!r} is not supported; {', '.join(ACTIVATIONS)} are")
    spec = VisionSpec(
        hidden_size=integer(fields, "hidden_size", 1152),
        intermediate_size=integer(fields, "intermediate_size", 4304),
        num_layers=integer(fields, "depth", 27),
        num_heads=integer(fields, "num_heads", 16),
        patch_size=integer(fields, "patch_size", 16),
        merge_size=integer(fields, "spatial_merge_size", 2),
        num_positions=integer(fields, "num_position_embeddings", 2304),
        image_token_id=integer(config, "image_token_id", 151655),
        placeholder=(
            integer(config, "vision_start_token_id", 151652),
            integer(config, "image_token_id", 151655),
            integer(config, "vision_end_token_id", 151653),
        ),
        rope_sections=_sections(text),
        deepstack=_deepstack(fields),
        activation=ACTIVATIONS[activation],
    )
    if spec.hidden_size % (4 * spec.num_heads):
        raise ModelError("'vision_config': 'hidden_size' must be a multiple of 4 for each of 'num_heads'")
    if round(spec.num_positions**0.5) ** 2 != spec.num_positions:
        raise ModelError("'vision_config': 'num_position_embeddings' must be a square")
    return spec


def _sections(text: Config) -> tuple[int, int, int]:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    found = rope.get("mrope_section") or (24, 20, 20)
    if (
        not isinstance(found, list | tuple)
        or len(found) != 3
        or not all(type(each) is int and each >= 0 for each in found)
    ):
        raise ModelError(f"'mrope_section' must be three numbers, got {found!r}")
    return found[0], found[1], found[2]


def _deepstack(fields: Config) -> tuple[int, ...]:
    found = fields.get("deepstack_visual_indexes") or []
    depth = integer(fields, "depth", 27)
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each < depth for each in found):
        raise ModelError(f"'deepstack_visual_indexes' must be layers below {depth}, got {found!r}")
    return tuple(found)


VISION: dict[str, Callable[[Config, Config], VisionSpec]] = {
    "Qwen3VLForConditionalGeneration": qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl,
    "Qwen3_5ForConditionalGeneration": qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": qwen3_vl,
}
