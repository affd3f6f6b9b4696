"""Image encoders of multimodal checkpoints, from the `vision_config` of their config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from engine.models.errors import ModelError
from engine.models.families.fields import Config, flag, integer, number
from engine.models.spec import VisionSpec

ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
}
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PIXTRAL_ROW_ENDS = 12, 13  # [IMG_BREAK] and [IMG_END] of all published tokenizers
# First parts of the names of a kind's tensors, without "model.".
TOWER = "vision_tower.", "multi_modal_projector."
PARTS = {
    "qwen": ("visual.",),
    "qwen2": ("visual.",),
    "glm": ("visual.",),
    "pixtral": TOWER,
    "siglip": TOWER,
    "intern": TOWER,
    "intern_chat": ("vision_model.", "mlp1."),
    "gemma4": ("vision_tower.", "embed_vision."),
    "gemma4_unified": ("vision_embedder.", "embed_vision."),
    "kimi_vl": TOWER,
    "kimi_k25": ("vision_tower.", "mm_projector."),
}


def qwen3_vl(config: Config, text: Config) -> VisionSpec:
    """Qwen3-VL, Qwen3.5, 3.6 and 3.8. Only Qwen3-VL has deepstack."""
    fields = _fields(config)
    spec = VisionSpec(
        hidden_size=integer(fields, "hidden_size", 1152),
        intermediate_size=integer(fields, "intermediate_size", 4304),
        num_layers=integer(fields, "depth", 27),
        num_heads=integer(fields, "num_heads", 16),
        patch_size=integer(fields, "patch_size", 16),
        merge_size=integer(fields, "spatial_merge_size", 2),
        num_positions=integer(fields, "num_position_embeddings", 2304),
        image_token_id=integer(config, "image_token_id", 151655),
        placeholder=_placeholder(config),
        video_token_id=integer(config, "video_token_id", 151656),
        rope_sections=_sections(text, (24, 20, 20)),
        deepstack=_layers(fields, "deepstack_visual_indexes", [], integer(fields, "depth", 32)),
        activation=_activation(fields, "gelu_pytorch_tanh"),
    )
    _check_heads(spec)
    if round(spec.num_positions**0.5) ** 2 != spec.num_positions:
        raise ModelError("'vision_config': 'num_position_embeddings' must be a square")
    return spec


def qwen2_vl(config: Config, text: Config) -> VisionSpec:
    """Qwen2-VL. Videos are not read."""
    fields = _fields(config)
    size = integer(fields, "embed_dim", 1280)
    spec = VisionSpec(
        kind="qwen2",
        hidden_size=size,
        intermediate_size=size * integer(fields, "mlp_ratio", 4),
        num_layers=integer(fields, "depth", 32),
        num_heads=integer(fields, "num_heads", 16),
        patch_size=integer(fields, "patch_size", 14),
        merge_size=integer(fields, "spatial_merge_size", 2),
        image_token_id=integer(config, "image_token_id", 151655),
        placeholder=_placeholder(config),
        rope_sections=_sections(text, (16, 24, 24)),
        rope_interleaved=False,
        activation="silu",
        steepness=1.702,
        is_older=True,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        min_pixels=56 * 56,
        max_pixels=12_845_056,
    )
    _check_heads(spec)
    if fields.get("hidden_act", "quick_gelu") != "quick_gelu":
        raise ModelError("'vision_config': 'hidden_act' must be quick_gelu")
    return spec


def qwen2_5_vl(config: Config, text: Config) -> VisionSpec:
    """Qwen2.5-VL: most layers see windows of 112 x 112 pixels."""
    fields = _fields(config)
    patch, merge = integer(fields, "patch_size", 14), integer(fields, "spatial_merge_size", 2)
    spec = VisionSpec(
        hidden_size=integer(fields, "hidden_size", 1280),
        intermediate_size=integer(fields, "intermediate_size", 3420),
        num_layers=integer(fields, "depth", 32),
        num_heads=integer(fields, "num_heads", 16),
        patch_size=patch,
        merge_size=merge,
        num_positions=0,
        image_token_id=integer(config, "image_token_id", 151655),
        placeholder=_placeholder(config),
        video_token_id=integer(config, "video_token_id", 151656),
        time_steps=number(fields, "tokens_per_second", 4.0),
        rope_sections=_sections(text, (16, 24, 24)),
        rope_interleaved=False,
        activation=_activation(fields, "silu"),
        is_older=True,
        window=integer(fields, "window_size", 112) // (patch * merge),
        full_layers=_layers(fields, "fullatt_block_indexes", [7, 15, 23, 31], MANY),  # fewer layers have some of them
        mean=CLIP_MEAN,
        std=CLIP_STD,
        min_pixels=56 * 56,
        max_pixels=12_845_056,
    )
    _check_heads(spec)
    if spec.activation != "silu" or spec.window < 1:
        raise ModelError("'vision_config': 'hidden_act' must be silu, and 'window_size' a block of patches or more")
    return spec


def pixtral(config: Config, text: Config) -> VisionSpec:
    """Mistral Small 3.1 and 3.2, Ministral 3, Devstral 2."""
    fields = _vision_config(config)
    if config.get("vision_feature_layer", -1) != -1 or fields.get("model_type", "pixtral") != "pixtral":
        raise ModelError("'vision_config': only the last layer of 'pixtral' is supported")
    side = integer(fields, "image_size", 1540)
    spec = VisionSpec(
        kind="pixtral",
        hidden_size=integer(fields, "hidden_size", 1024),
        intermediate_size=integer(fields, "intermediate_size", 4096),
        num_layers=integer(fields, "num_hidden_layers", 24),
        num_heads=integer(fields, "num_attention_heads", 16),
        patch_size=integer(fields, "patch_size", 14),
        merge_size=integer(config, "spatial_merge_size", 2),
        activation=_activation(fields, "gelu"),
        eps=1e-5,
        theta=_theta(fields),
        projector_activation=_activation(config, "gelu", "projector_hidden_act"),
        projector_bias=flag(config, "multimodal_projector_bias", False),
        projector_eps=number(text, "rms_norm_eps", 1e-6),
        image_token_id=integer(config, "image_token_index", integer(config, "image_token_id", 10)),
        placeholder=(integer(config, "image_token_index", integer(config, "image_token_id", 10)),),
        row_ends=PIXTRAL_ROW_ENDS,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        longest_edge=side,
    )
    _check_heads(spec)
    return spec


def siglip(config: Config, text: Config) -> VisionSpec:
    """Gemma 3 from 4B: square images, all of as many tokens, which see each other."""
    fields = _vision_config(config)
    patch, edge = integer(fields, "patch_size", 14), integer(fields, "image_size", 896)
    side, tokens = edge // patch, integer(config, "mm_tokens_per_image", 256)
    merge = side // max(math.isqrt(tokens), 1)
    image = integer(config, "image_token_index", integer(config, "image_token_id", 262144))
    begin, end = integer(config, "boi_token_index", 255999), integer(config, "eoi_token_index", 256000)
    spec = VisionSpec(
        kind="siglip",
        hidden_size=integer(fields, "hidden_size", 1152),
        intermediate_size=integer(fields, "intermediate_size", 4304),
        num_layers=integer(fields, "num_hidden_layers", 27),
        num_heads=integer(fields, "num_attention_heads", 16),
        patch_size=patch,
        merge_size=merge,
        num_positions=side**2,
        tile=(side, side),
        activation=_activation(fields, "gelu_pytorch_tanh"),
        eps=number(fields, "layer_norm_eps", 1e-6),
        image_token_id=image,
        marker_id=begin,
        placeholder=(begin,),
        before=(begin,),
        behind=(end,),
        margin="\n\n",
        sees_both_ways="all",
        max_tokens=tokens,
    )
    if edge % patch or merge * math.isqrt(tokens) != side or math.isqrt(tokens) ** 2 != tokens:
        raise ModelError("'vision_config': a square of 'mm_tokens_per_image' tokens must divide the patches")
    return spec


def intern(config: Config, text: Config) -> VisionSpec:
    """InternVL 3 and 3.5 in transformers' form: an image has up to 13 tiles."""
    fields = _vision_config(config)
    patch, edge = (_square(fields, name, default) for name, default in (("patch_size", 14), ("image_size", 448)))
    side, ratio = edge // patch, number(config, "downsample_ratio", 0.5)
    image = integer(config, "image_token_id", 151667)
    spec = VisionSpec(
        kind="intern",
        hidden_size=integer(fields, "hidden_size", 1024),
        intermediate_size=integer(fields, "intermediate_size", 4096),
        num_layers=integer(fields, "num_hidden_layers", 24),
        num_heads=integer(fields, "num_attention_heads", 16),
        patch_size=patch,
        merge_size=round(1 / ratio),
        num_positions=side**2,
        tile=(side, side),
        activation=_activation(fields, "gelu"),
        eps=number(fields, "layer_norm_eps", 1e-6),
        norm="rms" if fields.get("norm_type") == "rms_norm" else "layer",
        qkv_bias=flag(fields, "attention_bias", False),
        qk_norm=flag(fields, "use_qk_norm", False),
        projector_activation=_activation(config, "gelu", "projector_hidden_act"),
        projector_eps=1e-5,
        image_token_id=image,
        placeholder=(image,),
        before=(image - 2,),  # <img> and </img> of all published tokenizers
        behind=(image - 1,),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    if edge % patch or side % spec.merge_size or spec.merge_size * ratio != 1:
        raise ModelError("'vision_config': blocks of 1 / 'downsample_ratio' patches must divide 'image_size'")
    if not flag(fields, "use_mean_pooling", True) or config.get("vision_feature_layer", -1) != -1:
        raise ModelError("'vision_config': only the last layer, without a norm, is supported")
    return spec


def intern_chat(config: Config, text: Config) -> VisionSpec | None:
    """InternVL 2 to 3.5 as OpenGVLab publishes them. None: of this form only the text model is read.

    The tokenizer names the tokens of images.
    """
    fields, edge = _vision_config(config), config.get("force_image_size")
    is_known = config.get("ps_version") == "v2" and config.get("select_layer", -1) == -1
    is_cut = edge in (None, fields.get("image_size")) and not config.get("pad2square")
    if not is_known or not is_cut or not flag(config, "use_thumbnail", False):
        return None
    common = {"attention_bias": fields.get("qkv_bias"), "use_qk_norm": fields.get("qk_normalization")}
    most = integer(config, "max_dynamic_patch", 6) if flag(config, "dynamic_image_size", False) else 1
    found = intern(config | {"vision_config": fields | common}, text)
    return replace(
        found, kind="intern_chat", num_tiles=(integer(config, "min_dynamic_patch", 1), most), placeholder_end="\n"
    )


def glm(config: Config, text: Config) -> VisionSpec:
    """GLM-4.1V, 4.5V and 4.6V."""
    fields = _fields(config)
    patch, out = integer(fields, "patch_size", 14), integer(fields, "out_hidden_size", 4096)
    image = integer(config, "image_token_id", 151343)
    begin, end = integer(config, "image_start_token_id", 151339), integer(config, "image_end_token_id", 151340)
    spec = VisionSpec(
        kind="glm",
        hidden_size=integer(fields, "hidden_size", 1536),
        intermediate_size=out,
        num_layers=integer(fields, "depth", 24),
        num_heads=integer(fields, "num_heads", 12),
        patch_size=patch,
        merge_size=integer(fields, "spatial_merge_size", 2),
        num_positions=(_square(fields, "image_size", 336) // patch) ** 2,
        activation=_activation(fields, "silu"),
        eps=number(fields, "rms_norm_eps", 1e-5),
        qkv_bias=flag(fields, "attention_bias", False),
        theta=_theta(fields),
        projector_eps=1e-5,
        projector_size=integer(fields, "intermediate_size", 13696),
        image_token_id=image,
        placeholder=(begin, image, end),
        rope_sections=_sections(text, (8, 12, 12)),
        rope_interleaved=False,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        min_pixels=112 * 112,
        max_pixels=28 * 28 * 15000,
    )
    _check_heads(spec)
    if out != integer(text, "hidden_size", 4096):
        raise ModelError("'vision_config': 'out_hidden_size' must be the text model's 'hidden_size'")
    return spec


def glm_ocr(config: Config, text: Config) -> VisionSpec:
    """GLM-OCR: GLM's encoder without learnt positions, with biases and norms of queries and keys."""
    fields = {"hidden_size": 1024, "num_heads": 16, "out_hidden_size": 1536, "attention_bias": True, **_fields(config)}
    ids = {"image_token_id": 59280, "image_start_token_id": 59256, "image_end_token_id": 59257}
    spec = glm(ids | config | {"vision_config": fields}, text)
    return replace(
        spec,
        intermediate_size=integer(fields, "intermediate_size", 4096),
        num_positions=0,
        qk_norm=True,
        layer_bias=spec.qkv_bias,
        projector_size=3 * spec.intermediate_size,
        rope_sections=_sections(text, (16, 24, 24)),
    )


def gemma4(config: Config, text: Config) -> VisionSpec | None:
    """Gemma 4: up to 280 tokens of an image; in the larger models they see each other in layers with a window."""
    if config.get("vision_config") is None:
        return None
    fields = _vision_config(config)
    heads, head_dim = integer(fields, "num_attention_heads", 12), integer(fields, "head_dim", 64)
    if integer(fields, "num_key_value_heads", heads) != heads or head_dim % 4 or flag(fields, "attention_bias", False):
        raise ModelError("'vision_config': attention must have as many keys as queries, no bias, and 4 | 'head_dim'")
    return VisionSpec(
        kind="gemma4",
        hidden_size=integer(fields, "hidden_size", 768),
        intermediate_size=integer(fields, "intermediate_size", 3072),
        num_layers=integer(fields, "num_hidden_layers", 16),
        num_heads=heads,
        head_size=head_dim,
        patch_size=integer(fields, "patch_size", 16),
        merge_size=integer(fields, "pooling_kernel_size", 3),
        num_positions=integer(fields, "position_embedding_size", 10240),
        activation=_activation(fields, "gelu_pytorch_tanh", "hidden_activation"),
        eps=number(fields, "rms_norm_eps", 1e-6),
        theta=_theta(fields, 100.0),
        clips=flag(fields, "use_clipped_linears", False),
        is_standardised=flag(fields, "standardize", False),
        **_gemma4_prompt(config, text),
    )


def gemma4_unified(config: Config, text: Config) -> VisionSpec | None:
    """Gemma 4 12B: no encoder, patches of 48 x 48 pixels are projected into the text model."""
    if config.get("vision_config") is None:
        return None
    fields = _vision_config(config)
    side, size = integer(fields, "patch_size", 16) * integer(fields, "pooling_kernel_size", 3), "mm_embed_dim"
    spec = VisionSpec(
        kind="gemma4_unified",
        hidden_size=integer(fields, size, 3840),
        intermediate_size=3 * side**2,
        num_layers=0,
        num_heads=1,
        patch_size=side,
        merge_size=1,
        num_positions=integer(fields, "mm_posemb_size", 1120),
        eps=number(fields, "rms_norm_eps", 1e-6),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        **_gemma4_prompt(config, text),
    )
    if integer(fields, "output_proj_dims", spec.hidden_size) != spec.hidden_size:
        raise ModelError(f"'vision_config': 'output_proj_dims' must be {size!r}, {spec.hidden_size}")
    return spec


def _gemma4_prompt(config: Config, text: Config) -> dict[str, Any]:
    """Return the fields of an image's tokens in a prompt."""
    image = integer(config, "image_token_id", 258880)
    return {
        "image_token_id": image,
        "placeholder": (image,),
        "before": (integer(config, "boi_token_id", 255999),),
        "behind": (integer(config, "eoi_token_id", 258882),),
        "sees_both_ways": "windows" if text.get("use_bidirectional_attention") == "vision" else "",
        "max_tokens": integer(config, "vision_soft_tokens_per_image", 280),
        "pad_id": integer(text, "pad_token_id", 0, minimum=0),
    }


def kimi_vl(config: Config, text: Config) -> VisionSpec:
    """Kimi-VL: MoonViT, up to 1,024 tokens of an image."""
    return _moonvit(config, "kimi_vl", max_tokens=1024)


def kimi_k25(config: Config, text: Config) -> VisionSpec:
    """Kimi K2.5 and K2.6: MoonViT, up to 4,096 tokens of an image. Videos are not read."""
    return _moonvit(config, "kimi_k25", max_tokens=4096)


def _moonvit(config: Config, kind: Literal["kimi_vl", "kimi_k25"], max_tokens: int) -> VisionSpec:
    """Read MoonViT's fields, as published or as transformers writes them."""
    fields = _vision_config(config)
    known = {key.removeprefix("vt_").removeprefix("init_"): value for key, value in fields.items()}
    merge, high = known.get("merge_kernel_size", [2, 2]), integer(known, "pos_emb_height", 64)
    image = integer(config, "media_placeholder_token_id", integer(config, "image_token_id", 163605))
    spec = VisionSpec(
        kind=kind,
        hidden_size=integer(known, "hidden_size", 1152),
        intermediate_size=integer(known, "intermediate_size", 4304),
        num_layers=integer(known, "num_hidden_layers", 27),
        num_heads=integer(known, "num_attention_heads", 16),
        patch_size=integer(known, "patch_size", 14),
        merge_size=_square({"merge": merge}, "merge", 2),
        num_positions=high**2,
        activation="gelu_tanh",
        eps=1e-5,
        projector_eps=number(known, "projector_ln_eps", number(config, "projection_layer_norm_eps", 1e-5)),
        image_token_id=image,
        placeholder=(image,),
        max_tokens=max_tokens,
    )
    _check_heads(spec)
    if integer(known, "pos_emb_width", high) != high:
        raise ModelError("'vision_config': positions must be a square")
    if known.get("merge_type", "sd2_tpool") != "sd2_tpool" or known.get("mm_projector_type") not in (
        None,
        "patchmerger",
    ):
        raise ModelError("'vision_config': only the merger 'sd2_tpool' and the projector 'patchmerger' are supported")
    return spec


def _square(fields: Config, name: str, default: int) -> int:
    """Return the side of a square in pixels. config.json gives one number, or two equal ones."""
    found = fields.get(name)
    if isinstance(found, list) and len(found) == 2 and found[0] == found[1]:
        return integer({name: found[0]}, name)
    return integer(fields, name, default)


def _theta(fields: Config, default: float = 10_000.0) -> float:
    rope = fields.get("rope_parameters")
    return number(rope if isinstance(rope, dict) else fields, "rope_theta", default)


def _vision_config(config: Config) -> Config:
    fields = config.get("vision_config")
    if not isinstance(fields, dict):
        raise ModelError(f"'vision_config' must be an object, got {fields!r}")
    return fields


def _fields(config: Config) -> Config:
    fields = _vision_config(config)
    if integer(fields, "temporal_patch_size", 2) != 2 or integer(fields, "in_channels", 3) != 3:
        raise ModelError("'vision_config': patches must have 2 frames of 3 channels")
    return fields


def _activation(fields: Config, default: str, name: str = "hidden_act") -> Literal["silu", "gelu", "gelu_tanh"]:
    given = fields.get(name) or default
    if given not in ACTIVATIONS:
        raise ModelError(f"'vision_config': {name!r} {given!r} is not supported; {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[given]


def _placeholder(config: Config) -> tuple[int, ...]:
    return (
        integer(config, "vision_start_token_id", 151652),
        integer(config, "image_token_id", 151655),
        integer(config, "vision_end_token_id", 151653),
    )


def _check_heads(spec: VisionSpec) -> None:
    if spec.hidden_size % (4 * spec.num_heads):
        raise ModelError("'vision_config': 'hidden_size' must be a multiple of 4 for each of 'num_heads'")


def _sections(text: Config, default: tuple[int, int, int]) -> tuple[int, int, int]:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    found = rope.get("mrope_section") or default
    if (
        not isinstance(found, list | tuple)
        or len(found) != 3
        or not all(type(each) is int and each >= 0 for each in found)
    ):
        raise ModelError(f"'mrope_section' must be three numbers, got {found!r}")
    return found[0], found[1], found[2]


MANY = 1 << 16


def _layers(fields: Config, name: str, default: list[int], depth: int) -> tuple[int, ...]:
    found = fields.get(name)
    found = default if found is None else found
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each < depth for each in found):
        raise ModelError(f"{name!r} must be layers below {depth}, got {found!r}")
    return tuple(found)


VISION: dict[str, Callable[[Config, Config], VisionSpec | None]] = {
    "Qwen2VLForConditionalGeneration": qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl,
    "Qwen3_5ForConditionalGeneration": qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": qwen3_vl,
    "Mistral3ForConditionalGeneration": pixtral,
    "Gemma3ForConditionalGeneration": siglip,
    "Gemma4ForConditionalGeneration": gemma4,
    "Gemma4UnifiedForConditionalGeneration": gemma4_unified,
    "InternVLForConditionalGeneration": intern,
    "InternVLChatModel": intern_chat,
    "Glm4vForConditionalGeneration": glm,
    "Glm4vMoeForConditionalGeneration": glm,
    "Glm46VForConditionalGeneration": glm,
    "GlmOcrForConditionalGeneration": glm_ocr,
    "KimiVLForConditionalGeneration": kimi_vl,
    "KimiK25ForConditionalGeneration": kimi_k25,
    "Kimi_K25ForConditionalGeneration": kimi_k25,
}
