"""Patches and placeholders of every kind of encoder against transformers' Pillow processors, on odd images."""

from __future__ import annotations

import importlib.util
import json
import sys
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine.models.errors import ModelError
from engine.models.families.vision import VISION
from engine.models.spec import VisionSpec
from engine.vision.decode import decode
from engine.vision.loader import ImageLayout, ImageLoader
from engine.vision.processors import read_processor
from engine.vision.sources import Media
from tests.support.fake_engine import make_tokenizer
from tests.support.images import picture, saved

SIZES = [(1, 1), (3, 500), (200, 1), (31, 33), (48, 16), (64, 64), (333, 97), (97, 333), (640, 480), (1, 7), (1021, 35)]
SAVED = [("PNG", "RGB"), ("PNG", "L"), ("JPEG", "RGB"), ("PNG", "P"), ("JPEG", "CMYK"), ("WEBP", "RGB"), ("GIF", "P")]


def files() -> list[tuple[bytes, Image.Image]]:
    """Return odd images: files, and what transformers is given."""
    pytest.importorskip("transformers")
    found = []
    for number, size in enumerate(SIZES):
        format, mode = SAVED[number % len(SAVED)]
        data = saved(picture(*size, mode), format)
        found.append((data, Image.open(BytesIO(data)).convert("RGB")))
    return found


def processing(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


@pytest.fixture(autouse=True)
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' processors be imported without torchvision, which they name and the tests do not use."""
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():  # remembered from now on
        for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
            monkeypatch.setitem(sys.modules, f"torchvision{name}", ModuleType(f"torchvision{name}"))
        v2 = sys.modules["torchvision.transforms.v2"]
        v2.functional = sys.modules["torchvision.transforms.v2.functional"]  # type: ignore[attr-defined]
        v2.functional.InterpolationMode = int  # type: ignore[attr-defined]


def spec_of(architecture: str, config: dict[str, Any], **vision: Any) -> VisionSpec:
    spec = VISION[architecture](config | {"vision_config": vision}, {})
    assert spec is not None
    return spec


def pixels_of(patches: bytes, grid: tuple[int, int], side: int, merge: int) -> np.ndarray:
    """Return an image [3, height, width], from 0 to 1."""
    rows, columns = grid
    blocks = np.frombuffer(patches, np.uint8).reshape(rows // merge, columns // merge, merge, merge, 3, side, side)
    return blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side) / 255


def placed(vision: VisionSpec, processor: Any, image: Any, *, first: int = 7, last: int = 8) -> list[int]:
    """Return the prompt of one image between two tokens."""
    layout = ImageLayout(
        vision.image_token_id, vision.marker_id, vision.before, vision.behind, vision.row_ends, vision.merge_size
    )
    loader = ImageLoader(processor, Media(()), vision.image_token_id, "", 1, layout)
    marker = vision.image_token_id if vision.marker_id is None else vision.marker_id
    prompt = loader.place([first, marker, last], [image])
    [one] = prompt.images
    assert one.num_tokens == image.num_tokens
    assert one.start >= 1
    assert len(prompt.name_ids) == len(prompt.token_ids)
    assert min(prompt.name_ids[one.start : one.stop]) > 1 << 62
    assert max(*prompt.name_ids[: one.start], *prompt.name_ids[one.stop :]) < 1 << 20
    return prompt.token_ids


@pytest.mark.parametrize(("edge", "patch"), [(1540, 14), (300, 16)])
def test_pixtral(edge: int, patch: int, tmp_path: Path) -> None:
    vision = spec_of("Mistral3ForConditionalGeneration", {}, patch_size=patch)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": edge}}))
    processor = read_processor(tmp_path, vision)
    oracle = processing("pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil")(
        size={"longest_edge": edge}, patch_size=2 * patch
    )
    expand = processing("pixtral.processing_pixtral", "PixtralProcessor").replace_image_token
    names = SimpleNamespace(
        patch_size=patch, spatial_merge_size=2, image_token="10,", image_break_token="12,", image_end_token="13,"
    )
    for data, image in files():
        own, theirs = processor(decode(data)), oracle(image)
        height, width = theirs["image_sizes"][0]
        assert own.grid == (height // patch, width // patch), image.size
        wanted = theirs["pixel_values"][0] * np.reshape(vision.std, (3, 1, 1)) + np.reshape(vision.mean, (3, 1, 1))
        assert np.abs(pixels_of(own.patches, own.grid, patch, 2) - wanted).max() <= 1 / 255, image.size
        tokens = [int(each) for each in expand(names, theirs, 0).split(",")[:-1]]
        assert placed(vision, processor, own) == [7, *tokens, 8], image.size


def test_the_files_of_pixtral(tmp_path: Path) -> None:
    vision = spec_of("Mistral3ForConditionalGeneration", {}, image_size=1400)
    assert read_processor(tmp_path, vision) == read_processor(tmp_path, vision)
    file = tmp_path / "preprocessor_config.json"
    for wrong in ({"size": {"longest_edge": 0}}, {"image_mean": [0.5] * 3}, {"resample": True}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ModelError, match=next(iter(wrong))):
            read_processor(tmp_path, vision)
    with pytest.raises(ModelError, match="only the last layer"):
        spec_of("Mistral3ForConditionalGeneration", {"vision_feature_layer": -2})


@pytest.mark.parametrize(("edge", "tokens"), [(896, 256), (112, 4)])
def test_gemma3(edge: int, tokens: int, tmp_path: Path) -> None:
    vision = spec_of("Gemma3ForConditionalGeneration", {"mm_tokens_per_image": tokens}, image_size=edge)
    processor = read_processor(tmp_path, vision)
    oracle = processing("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil")(
        size={"height": edge, "width": edge}
    )
    for data, image in files():
        own = processor(decode(data))
        wanted = np.asarray(oracle(image)["pixel_values"][0]) * 0.5 + 0.5
        found = pixels_of(own.patches, own.grid, vision.patch_size, vision.merge_size)
        assert np.abs(found - wanted).max() <= 1 / 255, image.size
        assert placed(vision, processor, own) == [7, 255999, *[262144] * tokens, 256000, 8]
    for wrong in (
        {"size": {"height": 7}},
        {"pan_and_scan_max_num_crops": 1, "do_pan_and_scan": True},
        {"pan_and_scan_min_crop_size": 0.5, "do_pan_and_scan": True},
        {"pan_and_scan_min_ratio_to_activate": 0.5, "do_pan_and_scan": True},
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ModelError, match=next(iter(wrong))):
            read_processor(tmp_path, vision)
    with pytest.raises(ModelError, match="must divide"):
        spec_of("Gemma3ForConditionalGeneration", {"mm_tokens_per_image": 25})


@pytest.mark.parametrize("fields", [{}, {"pan_and_scan_min_crop_size": 30, "pan_and_scan_max_num_crops": 3}])
def test_crops_of_gemma3(fields: dict[str, Any], tmp_path: Path) -> None:
    vision = spec_of("Gemma3ForConditionalGeneration", {"mm_tokens_per_image": 4}, image_size=112)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_pan_and_scan": True} | fields))
    processor = read_processor(tmp_path, vision)
    defaults = {"pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4}
    oracle = processing("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil")(
        size={"height": 112, "width": 112}, do_pan_and_scan=True, pan_and_scan_min_ratio_to_activate=1.2,
        **defaults | fields,
    )  # fmt: skip
    counts = set()
    for size in (*SIZES, (640, 200), (200, 640), (1100, 260), (260, 1800), (520, 512), (641, 513)):
        image = picture(*size)
        own, theirs = processor(image), oracle(image)
        counts.add(int(theirs["num_crops"][0]))
        parts = own, *own.crops
        assert len(parts) == len(theirs["pixel_values"]) == theirs["num_crops"][0] + 1, size
        for part, pixels in zip(parts, theirs["pixel_values"], strict=True):
            found = pixels_of(part.patches, part.grid, vision.patch_size, vision.merge_size)
            assert np.abs(found - (np.asarray(pixels) * 0.5 + 0.5)).max() <= 1 / 255, size
    assert counts >= {0, 2, fields.get("pan_and_scan_max_num_crops", 4)}


def test_texts_around_images_of_gemma3(tmp_path: Path) -> None:
    """They join the template's own line breaks, as in transformers' processor, which expands texts, not tokens."""
    tokenizer = make_tokenizer("", ["<start_of_image>", "<soft>", "<end_of_image>"])
    begin, soft, end = (tokenizer.token_to_id(each) for each in ("<start_of_image>", "<soft>", "<end_of_image>"))
    assert begin is not None
    assert soft is not None
    assert end is not None
    vision = spec_of(
        "Gemma3ForConditionalGeneration",
        {"mm_tokens_per_image": 4, "image_token_index": soft, "boi_token_index": begin, "eoi_token_index": end},
        image_size=56,
    )
    layout = ImageLayout(soft, begin, (begin,), (end,), marker="<start_of_image>", margin=vision.margin)
    loader = ImageLoader(read_processor(tmp_path, vision), Media(()), soft, "", 2, layout)
    text = "user\n<start_of_image>What?\n<start_of_image>"
    images = [loader.load_image(picture(9, 9)), loader.load_image(picture(30, 8))]
    prompt = loader.place(tokenizer.encode(loader.written(text, images), False), images)
    expand = processing("gemma3.processing_gemma3", "Gemma3Processor").replace_image_token
    whole = expand(
        SimpleNamespace(full_image_sequence="\n\n<start_of_image>" + "<soft>" * 4 + "<end_of_image>\n\n"),
        {"num_crops": [0]}, 0,
    )  # fmt: skip
    assert prompt.token_ids == tokenizer.encode(text.replace("<start_of_image>", whole), False)
    assert [prompt.token_ids[each.start : each.stop] for each in prompt.images] == [[soft] * 4] * 2


@pytest.mark.parametrize(("edge", "most"), [(448, 12), (56, 3)])
def test_internvl(edge: int, most: int, tmp_path: Path) -> None:
    vision = spec_of("InternVLForConditionalGeneration", {}, image_size=[edge, edge], patch_size=[14, 14])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_patches": most, "crop_to_patches": False}))
    processor = read_processor(tmp_path, vision)
    oracle = processing("got_ocr2.image_processing_pil_got_ocr2", "GotOcr2ImageProcessorPil")(
        size={"height": edge, "width": edge}, crop_to_patches=True, max_patches=most,
        image_mean=list(vision.mean), image_std=list(vision.std),
    )  # fmt: skip
    expand = processing("internvl.processing_internvl", "InternVLProcessor").replace_image_token
    length = (edge // 28) ** 2
    names = SimpleNamespace(
        start_image_token="151665,", end_image_token="151666,", image_token="151667,", image_seq_length=length
    )
    for data, image in files():
        own, theirs = processor(decode(data)), oracle(image)
        tiles = np.asarray(theirs["pixel_values"])
        assert own.grid == (len(tiles) * edge // 14, edge // 14), image.size
        wanted = tiles * np.reshape(vision.std, (3, 1, 1)) + np.reshape(vision.mean, (3, 1, 1))
        found = pixels_of(own.patches, own.grid, 14, 2).reshape(3, -1, edge, edge).swapaxes(0, 1)
        assert np.abs(found - wanted).max() <= 1 / 255, image.size
        tokens = [int(each) for each in expand(names, theirs, 0).split(",")[:-1]]
        assert placed(vision, processor, own) == [7, *tokens, 8], image.size
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_patches": 0}))
    with pytest.raises(ModelError, match="max_patches"):
        read_processor(tmp_path, vision)
    with pytest.raises(ModelError, match="must divide"):
        spec_of("InternVLForConditionalGeneration", {"downsample_ratio": 0.3})
    with pytest.raises(ModelError, match="without a norm"):
        spec_of("InternVLForConditionalGeneration", {}, use_mean_pooling=False)


@pytest.mark.parametrize(("low", "high"), [(112 * 112, 28 * 28 * 15000), (5000, 90_000)])
@pytest.mark.parametrize("architecture", ["Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"])
def test_glm(architecture: str, low: int, high: int, tmp_path: Path) -> None:
    vision = spec_of(architecture, {})
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": low, "longest_edge": high}, "patch_size": 14, "merge_size": 2})
    )
    processor = read_processor(tmp_path, vision)
    family = architecture.removesuffix("ForConditionalGeneration")
    oracle = processing(
        f"{family.lower()}.image_processing_pil_{family.lower()}", f"{family}ImageProcessorPil"
    )(size={"shortest_edge": low, "longest_edge": high})  # fmt: skip
    for data, image in files():
        own, theirs = processor(decode(data)), oracle(image)
        rows, columns = theirs["image_grid_thw"][0][1:]
        assert own.grid == (rows, columns), image.size
        wanted = np.asarray(theirs["pixel_values"]).reshape(-1, 3, 2, 14, 14)[:, :, 0]
        wanted = wanted * np.reshape(vision.std, (3, 1, 1)) + np.reshape(vision.mean, (3, 1, 1))
        found = np.frombuffer(own.patches, np.uint8).reshape(wanted.shape) / 255
        assert np.abs(found - wanted).max() <= 1 / 255, image.size
        assert placed(vision, processor, own) == [7, *[151343] * (rows * columns // 4), 8]


@pytest.mark.parametrize("most", [280, 70])
def test_gemma4(most: int, tmp_path: Path) -> None:
    vision = spec_of("Gemma4ForConditionalGeneration", {})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": most, "image_mean": [0.0] * 3}))
    processor = read_processor(tmp_path, vision)
    oracle = processing("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil")(max_soft_tokens=most)
    for data, image in files():
        own, theirs = processor(decode(data)), oracle(image)
        [count], [positions] = theirs["num_soft_tokens_per_image"], theirs["image_position_ids"]
        columns, rows = positions.max(0) + 1
        assert own.grid == (rows, columns), image.size
        assert own.num_tokens == count
        wanted = np.asarray(theirs["pixel_values"][0])[: rows * columns].reshape(rows, columns, 16, 16, 3)
        wanted = wanted.transpose(4, 0, 2, 1, 3).reshape(3, rows * 16, columns * 16)
        assert np.abs(pixels_of(own.patches, own.grid, 16, 3) - wanted).max() <= 1 / 255, image.size
        assert placed(vision, processor, own) == [7, 255999, *[258880] * count, 258882, 8]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": 281}))
    with pytest.raises(ModelError, match="max_soft_tokens"):
        read_processor(tmp_path, vision)


def test_gemma4_12b(tmp_path: Path) -> None:
    """Patches are the blocks of other sizes' patches, in the order of rows."""
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import patches_merge

    vision = spec_of("Gemma4UnifiedForConditionalGeneration", {})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_soft_tokens": 140, "image_mean": [0.0] * 3}))
    processor = read_processor(tmp_path, vision)
    oracle = processing("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil")(max_soft_tokens=140)
    for data, image in files():
        own, theirs = processor(decode(data)), oracle(image)
        [count], [positions] = theirs["num_soft_tokens_per_image"], theirs["image_position_ids"]
        given = (torch.tensor(x[: 9 * count])[None] for x in (theirs["pixel_values"][0], positions))
        merged, at = patches_merge(*given, count)
        columns, rows = (at[0].amax(0) + 1).tolist()
        assert (own.grid, own.num_tokens) == ((rows, columns), count), image.size
        wanted = merged[0].view(count, 48, 48, 3).permute(0, 3, 1, 2).numpy()
        found = np.frombuffer(own.patches, np.uint8).reshape(wanted.shape) / 255
        assert np.abs(found - wanted).max() <= 1 / 255, image.size
        assert placed(vision, processor, own) == [7, 255999, *[258880] * count, 258882, 8]
    for wrong in ({"max_soft_tokens": 281}, {"patch_size": 14, "pooling_kernel_size": 3}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ModelError, match=next(iter(wrong))):
            read_processor(tmp_path, vision)
    with pytest.raises(ModelError, match="output_proj_dims"):
        spec_of("Gemma4UnifiedForConditionalGeneration", {}, output_proj_dims=5)
    assert VISION["Gemma4UnifiedForConditionalGeneration"]({}, {}) is None


FORMS_OF_KIMI: list[tuple[str, dict[str, Any], int, int]] = [
    ("KimiVL", {"in_token_limit": 300, "pad_input": True}, 300, 512),
    ("KimiVL", {}, 4096, 512),
    ("KimiK25", {"media_proc_cfg": {"in_patch_limit": 99, "patch_limit_on_one_side": 20}}, 99, 20),
    ("Kimi_K25", {"max_patches": 900, "size": {"max_height": 40, "max_width": 40}}, 900, 40),
]


@pytest.mark.parametrize(("architecture", "config", "most", "edge"), FORMS_OF_KIMI)
def test_kimi(architecture: str, config: dict[str, Any], most: int, edge: int, tmp_path: Path) -> None:
    """Sizes as transformers computes them; Pillow resizes, as moonshot's processors do, and the rest is black."""
    from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize

    vision = spec_of(f"{architecture}ForConditionalGeneration", {})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    processor = read_processor(tmp_path, vision)
    for data, image in files():
        own = processor(decode(data))
        (height, width), (high, wide) = navit_resize(image.height, image.width, 14, 2, most, edge)
        assert own.grid == (high // 14, wide // 14), image.size
        assert own.num_tokens == own.grid[0] * own.grid[1] // 4
        wanted = np.zeros((3, high, wide))
        smaller = image.resize((width, height), Image.Resampling.BICUBIC)
        wanted[:, :height, :width] = np.asarray(smaller).transpose(2, 0, 1) / 255
        assert np.abs(pixels_of(own.patches, own.grid, 14, 2) - wanted).max() <= 1 / 255, image.size
        assert placed(vision, processor, own) == [7, *[163605] * own.num_tokens, 8]


def test_the_files_of_kimi(tmp_path: Path) -> None:
    vision = spec_of("KimiVLForConditionalGeneration", {})
    wrongs: list[dict[str, Any]] = [
        {"in_token_limit": 0}, {"merge_size": 3}, {"patch_size": 16}, {"pad_input": False},
        {"patch_limit_on_one_side": "x"},
    ]  # fmt: skip
    for wrong in wrongs:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ModelError, match=next(iter(wrong))):
            read_processor(tmp_path, vision)
    published = {"vt_hidden_size": 64, "vt_num_attention_heads": 4, "init_pos_emb_height": 8, "init_pos_emb_width": 8}
    spec = spec_of("KimiK25ForConditionalGeneration", {"media_placeholder_token_id": 5}, **published)
    assert (spec.hidden_size, spec.num_heads, spec.num_positions, spec.image_token_id) == (64, 4, 64, 5)
    for field, value in (("merge_type", "x"), ("mm_projector_type", "x"), ("init_pos_emb_width", 3)):
        with pytest.raises(ModelError, match="vision_config"):
            spec_of("KimiK25ForConditionalGeneration", {}, **published | {field: value})
