"""Small random models that read images, and what transformers answers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional as F

from engine.core.engine_request import ImageInput
from tests.oracles.families import MISNAMED, rename_tensors

IMAGE, START, END, ROW_END, NEWLINES = 290, 292, 293, 294, 295
SIDE, MERGE = 4, 2
NUM_TOKENS = 64
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
    "partial_rotary_factor": 1.0,
}
TEXT = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_parameters": ROPE,
    "eos_token_id": None,
}
STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": SIDE,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
OLDEST = {
    "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": SIDE,
    "spatial_merge_size": MERGE, "temporal_patch_size": 2,
}  # fmt: skip
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1], "hidden_act": "silu", "tokens_per_second": 2}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": SIDE,
    "image_size": 64,
    "hidden_act": "silu",
}
SIGLIP = PIXTRAL | {"model_type": "siglip_vision_model", "image_size": 24, "vision_use_head": False}
SIGLIP["hidden_act"] = "gelu_pytorch_tanh"
GEMMA3 = {key: value for key, value in TEXT.items() if key != "rope_parameters"} | {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
    "query_pre_attn_scalar": 16,
}
INTERN = PIXTRAL | {
    "model_type": "internvl_vision", "image_size": [24, 24], "patch_size": [SIDE, SIDE], "attention_bias": True,
    "use_qk_norm": True, "hidden_act": "gelu",
}  # fmt: skip
GLM_VISION = VISION | {
    "hidden_act": "silu", "image_size": 20, "out_hidden_size": 64, "intermediate_size": 40, "attention_bias": False,
}  # fmt: skip
GLM_ROPE = {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5,
}  # fmt: skip
GLM = TEXT | {"rope_parameters": GLM_ROPE}
GLM_MOE = TEXT | {
    "rope_parameters": GLM_ROPE,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GEMMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": SIDE, "pooling_kernel_size": MERGE,
    "position_embedding_size": 20, "use_clipped_linears": True, "standardize": True,
}  # fmt: skip
GEMMA4 = GEMMA3 | {
    "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "global_head_dim": 16, "pad_token_id": 0,
    "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 300,
}  # fmt: skip
GEMMA4["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA4_12B = {key: value for key, value in GEMMA4.items() if "per_layer" not in key}
PROJECTED = {
    "patch_size": SIDE, "pooling_kernel_size": MERGE, "mm_embed_dim": 32, "mm_posemb_size": 20, "output_proj_dims": 32,
}  # fmt: skip
MOON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": SIDE,
    "pos_emb_height": 6, "pos_emb_width": 6, "merge_kernel_size": [MERGE, MERGE],
}  # fmt: skip
LATENT = TEXT | {
    "model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 8,
}  # fmt: skip
MISTRAL = {key: value for key, value in TEXT.items() if key != "rope_parameters"} | {"model_type": "mistral"}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": (TEXT | {"rope_parameters": SECTIONS}, OLDEST),
    "Qwen2_5_VL": (TEXT | {"rope_parameters": SECTIONS}, VISION | WINDOWS),
    "Qwen3VL": (TEXT, VISION | {"deepstack_visual_indexes": [0, 2]}),
    "Qwen3_5": (TEXT | STATES, VISION),
    "Mistral3": (MISTRAL, PIXTRAL),
    "Gemma3": (GEMMA3, SIGLIP),
    "Gemma4": (GEMMA4, GEMMA4_VISION),
    "Gemma4Unified": (GEMMA4_12B, PROJECTED),
    "Kimi_K25": (LATENT, MOON),
    "InternVL": (MISTRAL | {"model_type": "qwen3"}, INTERN),
    "Glm4v": (GLM, GLM_VISION),
    "Glm4vMoe": (GLM_MOE, GLM_VISION),
    "GlmOcr": (TEXT | {"rope_parameters": SECTIONS}, GLM_VISION | {"attention_bias": True}),
}


class Case(NamedTuple):
    """A model, a prompt with images, and the tokens that transformers generates."""

    folder: Path
    model: Any
    prompt: list[int]
    images: tuple[ImageInput, ...]
    answer: list[int]


def image(
    pixels: np.ndarray, start: int, grid: tuple[int, int], num_tokens: int = 0, *, sees_both_ways: bool = False
) -> ImageInput:
    """num_tokens: 0: those of the encoder."""
    data, num_tokens = pixels.tobytes(), num_tokens or len(pixels) // MERGE**2
    return ImageInput(start, num_tokens, grid, data, hashlib.sha256(data).hexdigest(), sees_both_ways)


def tokens_of(family: str, grid: tuple[int, int]) -> tuple[list[int], list[int], list[int]]:
    """Return the tokens that a family's processor writes before an image, for it and behind it."""
    rows, columns = (count // MERGE for count in grid)
    if family == "Mistral3":
        return [], [*(([IMAGE] * columns + [ROW_END]) * rows)[:-1], END], []
    if family == "Gemma3":  # its text between line breaks
        return [NEWLINES, START], [IMAGE] * (rows * columns), [END, NEWLINES]
    if family == "InternVL":
        return [IMAGE - 2], [IMAGE] * (rows * columns), [IMAGE - 1]
    return [START], [IMAGE] * (rows * columns), [END]


def config_of(family: str) -> Any:
    """Return the configuration of a small model."""
    import transformers

    text, vision = FAMILIES[family]
    ids: dict[str, Any] = {
        "image_token_id": IMAGE, "video_token_id": 291, "vision_start_token_id": START, "vision_end_token_id": END,
    }  # fmt: skip
    if family.startswith("Glm"):
        ids = {"image_token_id": IMAGE, "image_start_token_id": START, "image_end_token_id": END}
    if family == "InternVL":
        ids = {"image_token_id": IMAGE}
    if family == "Mistral3":
        ids = {"image_token_index": IMAGE, "spatial_merge_size": MERGE}
    if family == "Kimi_K25":
        ids = {"image_token_id": IMAGE, "video_token_id": 291, "projection_hidden_size": 32}
    if family.startswith("Gemma4"):
        ids = {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END, "audio_config": None}
        ids |= {"vision_soft_tokens_per_image": 15}
    if family == "Gemma3":
        ids = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 9}
    kind = getattr(transformers, f"{family}Config")
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)


def make_case(family: str, folder: Path, *, answers: bool = True) -> Case:
    """Save a random model of a family in `folder`. answers: false: the case has no tokens of transformers."""
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config_of(family)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "bias" in name:
            is_vision = any(part in name for part in ("visual", "vision_tower", "multi_modal"))
            torch.nn.init.normal_(parameter, 0, 0.5 if "visual" in name else 0.3 if is_vision else 0.2)
    with torch.no_grad():
        model.lm_head.weight[[IMAGE, 291]] = 0  # answers have no placeholders, which transformers reads as images
    for name, buffer in model.named_buffers():  # limits and standards of Gemma 4
        if name.endswith(("_min", "_max")):
            buffer.fill_(-3.0 if name.endswith("_min") else 3.0)
        if name.endswith(("std_bias", "std_scale")):
            torch.nn.init.normal_(buffer, 0.5, 0.2)
    model.save_pretrained(folder)
    if family == "Kimi_K25":
        rename_tensors(folder, MISNAMED["kimi_k2.5"])
    limits: Any = {"size": {"shortest_edge": 64, "longest_edge": 64 if family == "Mistral3" else 4096}}
    if family.startswith("Gemma") or family in ("InternVL", "Kimi_K25"):
        limits = {}
    (folder / "preprocessor_config.json").write_text(json.dumps(limits))
    rng = np.random.default_rng(5)
    prompt: list[int] = []
    shown: list[tuple[np.ndarray, tuple[int, int]]] = []
    images: list[ImageInput] = []
    for num_text, grid in ((7, (6, 10)), (1, (8, 4)), (5, (2, 2)), (19, None)):
        prompt += rng.integers(1, 280, num_text).tolist()
        if grid is not None:
            grid = (6, 6) if family == "Gemma3" else grid
            grid = (6 * len(images) + 6, 6) if family == "InternVL" else grid
            before, run, behind = tokens_of(family, grid)
            side = SIDE
            if family == "Gemma4Unified":  # whose patches are blocks of others
                side, grid = SIDE * MERGE, (grid[0] // MERGE, grid[1] // MERGE)
            pixels = rng.integers(0, 256, (grid[0] * grid[1], 3, side, side), dtype=np.uint8)
            both_ways = family.startswith("Gemma")
            images.append(image(pixels, len(prompt) + len(before), grid, len(run), sees_both_ways=both_ways))
            shown.append((pixels, grid))
            prompt += [*before, *run, *behind]
    return Case(folder, model, prompt, tuple(images), generated(model, prompt, shown) if answers else [])


def normalised(model: Any, pixels: np.ndarray) -> np.ndarray:
    """Return what a model's processor makes of uint8 patches [N, 3, P, P]: float64."""
    mean, std = [0.5] * 3, [0.5] * 3
    if type(model).__name__.startswith(("Qwen2", "Mistral3", "Glm")):
        mean, std = CLIP_MEAN, CLIP_STD
    if type(model).__name__.startswith("InternVL"):
        mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    shape = (3, 1, 1)
    return (pixels / 255 - np.reshape(mean, shape)) / np.reshape(std, shape)


def whole_image(patches: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return the image [3, height, width] of patches [N, 3, P, P] in blocks."""
    rows, columns = grid
    blocks = patches.reshape(rows // MERGE, columns // MERGE, MERGE, MERGE, 3, SIDE, SIDE)
    return blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * SIDE, columns * SIDE)


def in_rows(patches: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return patches [N, 3, P, P] in blocks in the order of rows."""
    rows, columns = grid
    blocks = patches.reshape(rows // MERGE, columns // MERGE, MERGE, MERGE, 3, SIDE, SIDE)
    return blocks.transpose(0, 2, 1, 3, 4, 5, 6).reshape(len(patches), 3, SIDE, SIDE)


def inputs_of(model: Any, shown: list[tuple[np.ndarray, tuple[int, int]]]) -> dict[str, Any]:
    """Return images as a model takes them. shown: patches uint8 [N, 3, P, P] and grid of each image."""
    if type(model).__name__.startswith("Kimi"):
        rows_of_all = [in_rows(normalised(model, pixels), grid) for pixels, grid in shown]
        grids = torch.tensor([(1, *grid) for _, grid in shown])
        return {"pixel_values": torch.tensor(np.concatenate(rows_of_all)), "image_grid_thw": grids}
    if type(model).__name__.startswith("Gemma4"):
        is_unified = "Unified" in type(model).__name__
        most = max(len(pixels) for pixels, _ in shown)
        values_of_all = torch.zeros(len(shown), most, shown[0][0][0].size, dtype=torch.float64)
        positions = torch.full((len(shown), most, 2), -1)
        for i, (pixels, (rows, columns)) in enumerate(shown):
            in_order = pixels if is_unified else in_rows(pixels, (rows, columns))
            values = in_order.transpose(0, 2, 3, 1).reshape(len(pixels), -1) / 255
            values_of_all[i, : len(pixels)] = torch.tensor(values)
            positions[i, : len(pixels)] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        return {"pixel_values": values_of_all, "image_position_ids": positions}
    if type(model).__name__.startswith("InternVL"):
        stacked = np.concatenate([whole_image(normalised(model, pixels), grid) for pixels, grid in shown], 1)
        tiles = stacked.reshape(3, -1, 6 * SIDE, 6 * SIDE).swapaxes(0, 1)
        return {"pixel_values": torch.tensor(tiles)}
    if type(model).__name__.startswith(("Mistral3", "Gemma3")):
        pictures = [torch.tensor(whole_image(normalised(model, pixels), grid)) for pixels, grid in shown]
        sizes = torch.tensor([each.shape[1:] for each in pictures])
        height, width = sizes.amax(0).tolist()
        padded = [F.pad(each, (0, width - each.shape[2], 0, height - each.shape[1])) for each in pictures]
        found = {"pixel_values": torch.stack(padded)}
        return found | ({"image_sizes": sizes} if type(model).__name__.startswith("Mistral3") else {})
    values = normalised(model, np.concatenate([pixels for pixels, _ in shown]))
    frames = np.repeat(values[:, :, None], 2, 2).reshape(len(values), -1)
    grids = torch.tensor([(1, *grid) for _, grid in shown])
    return {"pixel_values": torch.tensor(frames), "image_grid_thw": grids}


@torch.inference_mode()
def encoded(model: Any, case: Case) -> torch.Tensor:
    """Return what a model's encoder makes of a case's images, one behind the other: [T, hidden], in its dtype."""
    weight = next(model.parameters())
    sides = [math.isqrt(len(each.patches) // 3 // math.prod(each.grid)) for each in case.images]
    shown = [
        (np.frombuffer(each.patches, np.uint8).reshape(-1, 3, side, side), each.grid)
        for each, side in zip(case.images, sides, strict=True)
    ]
    inputs = {
        name: value.to(weight.device, weight.dtype) if value.is_floating_point() else value.to(weight.device)
        for name, value in inputs_of(model, shown).items()
    }
    found = model.model.get_image_features(**inputs)
    pooled = getattr(found, "pooler_output", found)
    return torch.cat(list(pooled)).view(-1, pooled[0].shape[-1])


@contextmanager
def masks_of_gemma4() -> Iterator[None]:
    """Let images of Gemma 4 12B see both ways in layers with windows only, as those of other sizes do. Its `forward` in
    transformers 5.17 lets them in all layers, other than its own `create_masks_for_vision_model`.
    """
    from transformers.models.gemma4_unified import modeling_gemma4_unified as unified

    plain = unified.create_masks_for_generate

    def masks(block_sequence_ids: torch.Tensor | None = None, **given: Any) -> Any:
        if block_sequence_ids is None:
            return plain(**given)
        return unified.create_masks_for_vision_model(block_sequence_ids=block_sequence_ids, **given)

    with patch.object(unified, "create_masks_for_generate", masks):
        yield


def generated(model: Any, prompt: list[int], shown: list[tuple[np.ndarray, tuple[int, int]]]) -> list[int]:
    """Return what transformers answers. shown: patches uint8 [N, 3, P, P] and grid of each image."""
    ids = torch.tensor([prompt])
    more: dict[str, Any] = inputs_of(model, shown)
    more["pixel_values"] = more["pixel_values"].float()
    if ("image_grid_thw" in more and "Kimi" not in type(model).__name__) or "image_position_ids" in more:
        more["mm_token_type_ids"] = (ids == IMAGE).int()
    if type(model).__name__.startswith("Gemma3"):
        more["token_type_ids"] = (ids == IMAGE).int()
    with torch.no_grad(), masks_of_gemma4():
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, **more
        )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


OPENGVLAB = (
    ("vision_tower.encoder.layer.", "vision_model.encoder.layers."), ("vision_tower.", "vision_model."),
    ("cls_token", "class_embedding"), ("position_embeddings", "position_embedding"),
    ("patch_embeddings.projection", "patch_embedding"), ("layernorm_before", "norm1"), ("layernorm_after", "norm2"),
    ("attention.projection_layer", "attn.proj"), ("attention.", "attn."), ("lambda_", "ls"),
    ("multi_modal_projector.layer_norm", "mlp1.0"), ("multi_modal_projector.linear_1", "mlp1.1"),
    ("multi_modal_projector.linear_2", "mlp1.3"),
)  # fmt: skip


def save_as_published(folder: Path, target: Path) -> None:
    """Save the checkpoint of InternVL in `folder` as OpenGVLab would publish it: other names, fields and fused QKV."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    vision = config.pop("vision_config")
    vision |= {"qkv_bias": vision.pop("attention_bias"), "qk_normalization": vision.pop("use_qk_norm")}
    vision |= {"image_size": vision["image_size"][0], "patch_size": vision["patch_size"][0]}
    config |= {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": config.pop("text_config"),
        "vision_config": vision, "ps_version": "v2", "select_layer": -1, "force_image_size": vision["image_size"],
        "dynamic_image_size": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12, "use_thumbnail": True,
    }  # fmt: skip
    del config["image_token_id"], config["vision_feature_layer"]
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.startswith("language_model."):
            for theirs, published in OPENGVLAB:
                name = name.replace(theirs, published)
        tensors[name] = tensor
    for i in range(vision["num_hidden_layers"]):
        attention = f"vision_model.encoder.layers.{i}.attn"
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{attention}.{part}_proj.{kind}") for part in "qkv"]
            tensors[f"{attention}.qkv.{kind}"] = torch.cat(parts)
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    (target / "preprocessor_config.json").write_text(json.dumps({"size": vision["image_size"], "crop_size": 24}))
