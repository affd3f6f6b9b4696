"""Decoded and resized images against transformers' Pillow processors, on sixty odd images."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.models.errors import ModelError
from engine.models.spec import VisionSpec
from engine.vision import decode as decoding
from engine.vision.decode import ImageError, decode
from engine.vision.processors import read_processor
from tests.support.images import picture, saved

VISION = VisionSpec(
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=2,
    patch_size=16,
    merge_size=2,
    num_positions=16,
    image_token_id=290,
    placeholder=(290,),
    rope_sections=(4, 2, 2),
)
SIZES = [(1, 1), (3, 500), (200, 1), (31, 33), (48, 16), (64, 64), (333, 97), (97, 333), (640, 480), (1, 7), (1021, 35)]
SAVED = [("PNG", "RGB"), ("PNG", "L"), ("PNG", "1"), ("PNG", "P"), ("JPEG", "CMYK"), ("WEBP", "RGB"), ("GIF", "P")]


def png_of(width: int, height: int) -> bytes:
    """A file that claims to have so many pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(bytes(1000))
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (header, data)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(("format", "mode"), SAVED, ids=[f"{format}-{mode}" for format, mode in SAVED])
def test_patches_equal_those_of_transformers(format: str, mode: str, tmp_path: Path) -> None:
    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    for number, size in enumerate(SIZES):
        data = saved(picture(*size, mode), format)
        limits = ((65_536, 16_777_216), (1024, 90_000), (3136, 10_000_000))[number % 3]
        patch = (16, 14)[number % 2]
        vision = replace(VISION, patch_size=patch, min_pixels=limits[0], max_pixels=limits[1])
        own = read_processor(tmp_path, vision)(decode(data))
        oracle = processing.Qwen2VLImageProcessorPil(
            patch_size=patch, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
            size={"shortest_edge": limits[0], "longest_edge": limits[1]},
        )(Image.open(BytesIO(data)).convert("RGB"))  # fmt: skip
        rows, columns = oracle["image_grid_thw"][0][1:]
        assert own.grid == (rows, columns), size
        assert own.num_tokens == rows * columns // 4
        wanted = np.asarray(oracle["pixel_values"]).reshape(-1, 3, 2, patch, patch)[:, :, 0] * 0.5 + 0.5
        found = np.frombuffer(own.patches, np.uint8).reshape(wanted.shape) / 255
        assert np.abs(found - wanted).max() <= 1 / 255, size


def test_exif_turns() -> None:
    image = picture(40, 30)
    exif = Image.Exif()
    for orientation, turn in ((3, Image.Transpose.ROTATE_180), (6, Image.Transpose.ROTATE_270)):
        exif[0x0112] = orientation
        found = decode(saved(image, exif=exif))
        assert np.array_equal(np.asarray(found), np.asarray(image.transpose(turn)))
    exif[0x0112] = 77
    assert decode(saved(image, exif=exif)).size == image.size


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_white(mode: str) -> None:
    image = picture(20, 20).convert("RGBA")
    image.putalpha(0)
    image.paste((255, 0, 0, 255), (0, 0, 10, 20))
    options: dict[str, Any] = {}
    if mode == "P":
        image, options = image.convert("RGB").convert("P"), {"transparency": 0}
        image.paste(0, (10, 0, 20, 20))
    found = np.asarray(decode(saved(image.convert(mode), **options)))
    assert (found[:, 10:] == 255).all()
    assert not (found[:, :10] == 255).all()


def test_sixteen_bits() -> None:
    values = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    found = np.asarray(decode(saved(Image.fromarray(values))))
    assert np.array_equal(found[:, :, 0], values >> 8)
    assert np.array_equal(found[:, :, 1], found[:, :, 2])


def test_the_first_frame_of_several() -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue", "green")]
    for format in ("GIF", "WEBP", "PNG"):
        data = saved(frames[0], format, save_all=True, append_images=frames[1:])
        assert np.asarray(decode(data))[0, 0].tolist() == [255, 0, 0]


def test_bad_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saved(picture(300, 200), "JPEG")
    bad = {
        "no PNG, JPEG, WebP or GIF": [
            b"",
            b"hello",
            b"%!PS-Adobe-3.0 EPSF-3.0\n",
            b"<svg/>",
            saved(picture(9, 9), "BMP"),
        ],
        "damaged": [whole[: len(whole) // 2], saved(picture(90, 90))[:-400]],
        "times the other": [saved(Image.new("1", (10_000, 1)))],
        "at most 50,000,000": [png_of(8000, 8000)],
        "too many pixels": [png_of(14_000, 14_000), png_of(65_000, 65_000)],
    }
    for reason, files in bad.items():
        for data in files:
            with pytest.raises(ImageError, match=reason):
                decode(data)
    monkeypatch.setattr(decoding, "MAX_BYTES", 1 << 20)
    with pytest.raises(ImageError, match="MiB"):
        decode(bytes((1 << 20) + 1))


def test_the_preprocessor_file(tmp_path: Path) -> None:
    def read(name: str, content: Any) -> Any:
        (tmp_path / name).write_text(json.dumps(content))
        return read_processor(tmp_path, VISION)

    found: Any = read_processor(tmp_path, VISION)
    assert found.max_pixels == 16_777_216
    own = {"size": {"shortest_edge": 5000, "longest_edge": 90000}, "resample": 2}
    assert read("processor_config.json", {"image_processor": own}).min_pixels == 5000
    found = read("preprocessor_config.json", {"min_pixels": 4000, "max_pixels": 8000, "patch_size": 16})
    assert (found.min_pixels, found.max_pixels) == (4000, 8000)
    for wrong in ({"patch_size": 14}, {"image_mean": [0.4] * 3}, {"size": {"longest_edge": "x"}}, {"resample": 9}):
        with pytest.raises(ModelError, match=next(iter(wrong))):
            read("preprocessor_config.json", wrong)
