"""Small random models that read images, and what transformers answers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.core.engine_request import ImageInput

IMAGE, START, END = 290, 292, 293
SIDE, MERGE = 4, 2
NUM_TOKENS = 24
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
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1], "hidden_act": "silu"}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2_5_VL": (TEXT | {"rope_parameters": SECTIONS}, VISION | WINDOWS),
    "Qwen3VL": (TEXT, VISION | {"deepstack_visual_indexes": [0, 2]}),
    "Qwen3_5": (TEXT | STATES, VISION),
}


class Case(NamedTuple):
    """A model, a prompt with images, and the tokens that transformers generates."""

    folder: Path
    model: Any
    prompt: list[int]
    images: tuple[ImageInput, ...]
    answer: list[int]


def image(pixels: np.ndarray, start: int, grid: tuple[int, int]) -> ImageInput:
    data = pixels.tobytes()
    return ImageInput(start, len(pixels) // MERGE**2, grid, data, hashlib.sha256(data).hexdigest())


def make_case(family: str, folder: Path) -> Case:
    """Save a random model of a family in `folder`."""
    import transformers

    text, vision = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=291,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "bias" in name:
            torch.nn.init.normal_(parameter, 0, 0.5 if "visual" in name else 0.2)
    model.save_pretrained(folder)
    limits = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    (folder / "preprocessor_config.json").write_text(json.dumps(limits))
    rng = np.random.default_rng(5)
    prompt: list[int] = []
    shown: list[tuple[np.ndarray, tuple[int, int]]] = []
    images = []
    for num_text, grid in ((7, (6, 10)), (1, (8, 4)), (5, (2, 2)), (19, None)):
        prompt += rng.integers(1, 280, num_text).tolist()
        if grid is not None:
            pixels = rng.integers(0, 256, (grid[0] * grid[1], 3, SIDE, SIDE), dtype=np.uint8)
            images.append(image(pixels, len(prompt) + 1, grid))
            shown.append((pixels, grid))
            prompt += [START, *[IMAGE] * images[-1].num_tokens, END]
    return Case(folder, model, prompt, tuple(images), generated(model, prompt, shown))


def normalised(model: Any, pixels: np.ndarray) -> np.ndarray:
    """Return what a model's processor makes of uint8 patches [N, 3, P, P]: float64."""
    older = "Qwen2_5_VL" in type(model).__name__
    mean, std = (CLIP_MEAN, CLIP_STD) if older else ([0.5] * 3, [0.5] * 3)
    shape = (3, 1, 1)
    return (pixels / 255 - np.reshape(mean, shape)) / np.reshape(std, shape)


def generated(model: Any, prompt: list[int], shown: list[tuple[np.ndarray, tuple[int, int]]]) -> list[int]:
    """Return what transformers answers. shown: patches uint8 [N, 3, P, P] and grid of each image."""
    values = normalised(model, np.concatenate([pixels for pixels, _ in shown]))
    frames = np.repeat(values[:, :, None], 2, 2).reshape(len(values), -1)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=torch.tensor(frames).float(),
            image_grid_thw=torch.tensor([(1, *grid) for _, grid in shown]),
            mm_token_type_ids=(ids == IMAGE).int(),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer
