"""Resizes images and cuts them into patches, as transformers' Pillow processors do."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.models.errors import ModelError
from engine.models.spec import VisionSpec
from engine.utils.folder_files import read_file
from engine.vision.decode import check_size

if TYPE_CHECKING:
    from PIL import Image

FILES = ("preprocessor_config.json", "processor_config.json")
MAX_FILE_BYTES = 16 << 20
BICUBIC, RESAMPLING = 3, range(6)  # Pillow's numbers


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as the model's encoder reads it."""

    num_tokens: int
    grid: tuple[int, int]  # rows and columns of patches
    patches: bytes  # uint8 [rows · columns, 3, P, P], in the order in which the encoder merges them
    digest: str  # hexadecimal SHA-256 of the grid and the patches


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """Makes patches of RGB images."""

    patch_size: int  # pixels of a side
    merge_size: int  # patches of a side of a block that becomes a token
    min_pixels: int
    max_pixels: int
    resampling: int = BICUBIC

    def __call__(self, image: Image.Image) -> ProcessedImage:
        """Raises `ImageError` for an image that is too narrow."""
        import numpy as np
        from PIL import Image

        check_size(*image.size)
        width, height = image.size
        height, width = self.size_of(height, width)
        pixels = np.asarray(image.resize((width, height), Image.Resampling(self.resampling)))
        side, merge = self.patch_size, self.merge_size
        rows, columns = height // side, width // side
        blocks = pixels.reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
        patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5).tobytes()
        digest = hashlib.sha256(f"{rows} {columns} ".encode() + patches).hexdigest()
        return ProcessedImage(rows * columns // merge**2, (rows, columns), patches, digest)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which an image is resized: multiples of a block's side, of about the same
        shape, with at least `min_pixels` and at most `max_pixels` together, where that is possible.
        """
        block = self.patch_size * self.merge_size
        rows, columns = round(height / block), round(width / block)
        if rows * columns * block**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / block))
            columns = max(1, math.floor(width / shrink / block))
        elif rows * columns * block**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / block), math.ceil(width * grow / block)
        return rows * block, columns * block


def read_processor(folder: Path, vision: VisionSpec) -> ImageProcessor:
    """Return the processor of the model in `folder`, from its preprocessor_config.json. Raises `ModelError`."""
    name, config = _config(folder)

    def wrong(field: str, wanted: Any) -> ModelError:
        return ModelError(f"{folder / name}: {field!r} must be {wanted}, got {config.get(field)!r}")

    for field, value in (("patch_size", vision.patch_size), ("merge_size", vision.merge_size)):
        if config.get(field, value) != value:
            raise wrong(field, f"{value}, as in config.json")
    for field, values in (("image_mean", vision.mean), ("image_std", vision.std)):
        given = config.get(field, values)
        if not isinstance(given, list | tuple) or not _are_close(given, values):
            raise wrong(field, f"{list(values)} for this model")
    resampling = config.get("resample", BICUBIC)
    if type(resampling) is not int or resampling not in RESAMPLING:
        raise wrong("resample", f"one of {', '.join(map(str, RESAMPLING))}")
    sizes = config.get("size") or {}
    low = config.get("min_pixels", sizes.get("shortest_edge", vision.min_pixels))
    high = config.get("max_pixels", sizes.get("longest_edge", vision.max_pixels))
    if type(low) is not int or type(high) is not int or not 0 < low <= high:
        raise wrong("size", "an object with 'shortest_edge' and 'longest_edge', numbers of pixels")
    return ImageProcessor(vision.patch_size, vision.merge_size, low, high, resampling)


def _are_close(given: Sequence[Any], values: Sequence[float]) -> bool:
    are_numbers = all(isinstance(each, int | float) for each in given) and len(given) == len(values)
    return are_numbers and all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(given, values, strict=True))


def _config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the fields of the folder's file, with its name; none if there is no file."""
    for name in FILES:
        if not (folder / name).is_file():
            continue
        try:
            found = json.loads(read_file(folder / name, folder, MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{folder / name} cannot be read: {error}") from None
        if isinstance(found, dict) and name == "processor_config.json":
            found = found.get("image_processor")
        if isinstance(found, dict):
            return name, found
    return FILES[0], {}
