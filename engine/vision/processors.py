"""Resizes images and cuts them into patches, as transformers' Pillow processors do."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.models.errors import ModelError
from engine.models.spec import VisionSpec
from engine.utils.folder_files import read_file
from engine.vision.decode import check_size

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

FILES = ("preprocessor_config.json", "processor_config.json")
MAX_FILE_BYTES = 16 << 20
MAX_TILES = 64  # of an image, without the whole one
BILINEAR, BICUBIC, RESAMPLING = 2, 3, range(6)  # Pillow's numbers


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as the model's encoder reads it."""

    num_tokens: int  # of a prompt, from its first one to its last one, with those that end rows
    grid: tuple[int, int]  # rows and columns of patches
    patches: bytes  # uint8 [frames, rows · columns, 3, P, P], in the order in which the encoder merges them
    digest: str  # hexadecimal SHA-256 of the grid and the patches
    num_frames: int = 1  # 2: of a video
    moment: int | None = None  # see `ImageInput`
    crops: tuple[ProcessedImage, ...] = ()  # parts of it that are shown behind it, with texts between

    @property
    def num_bytes(self) -> int:
        """Bytes of the patches, with those of crops."""
        return len(self.patches) + sum(crop.num_bytes for crop in self.crops)


class Processor(Protocol):
    """Makes patches of RGB images."""

    @property
    def merge_size(self) -> int:
        """Patches of a side of a block that becomes a token."""

    def __call__(self, image: Image.Image) -> ProcessedImage:
        """Raises `ImageError` for an image that is too narrow."""


def cut(image: Image.Image | np.ndarray, patch_size: int, merge_size: int) -> tuple[tuple[int, int], bytes]:
    """Return the grid and the patches of an image, whose sides are multiples of a block's."""
    import numpy as np

    pixels = np.asarray(image)
    rows, columns = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    shape = rows // merge_size, merge_size, patch_size, columns // merge_size, merge_size, patch_size, 3
    return (rows, columns), pixels.reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5).tobytes()


def resized(image: Image.Image, size: tuple[int, int], resampling: int) -> Image.Image:
    """Return the image with this height and width; itself, if it has them."""
    from PIL import Image

    height, width = size
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling(resampling))


def digest_of(grid: tuple[int, int], patches: bytes, moment: int | None = None) -> str:
    """Return the digest of an image: of all that its tokens' keys and values depend on."""
    at = "" if moment is None else f"{moment} "
    return hashlib.sha256(f"{grid[0]} {grid[1]} {at}".encode() + patches).hexdigest()


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """Makes patches of images of nearly any size, for the encoders of Qwen and GLM."""

    patch_size: int  # pixels of a side
    merge_size: int  # patches of a side of a block that becomes a token
    min_pixels: int
    max_pixels: int
    resampling: int = BICUBIC
    frames: int = 1  # how often each pixel counts
    grows: bool = False  # sides below a block's become as long first

    def __call__(self, image: Image.Image) -> ProcessedImage:
        """Raises `ImageError` for an image that is too narrow."""
        check_size(*image.size)
        image = resized(image, self.size_of(image.height, image.width), self.resampling)
        grid, patches = cut(image, self.patch_size, self.merge_size)
        return ProcessedImage(grid[0] * grid[1] // self.merge_size**2, grid, patches, digest_of(grid, patches))

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which an image is resized: multiples of a block's side, of about the same
        shape, with at least `min_pixels` and at most `max_pixels` together, where that is possible.
        """
        block, frames = self.patch_size * self.merge_size, self.frames
        if self.grows and min(height, width) < block:
            scale = max(block / height, block / width)
            height, width = int(height * scale), int(width * scale)
        rows, columns = round(height / block), round(width / block)
        if frames * rows * columns * block**2 > self.max_pixels:
            shrink = math.sqrt(frames * height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / block))
            columns = max(1, math.floor(width / shrink / block))
        elif frames * rows * columns * block**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            rows, columns = math.ceil(height * grow / block), math.ceil(width * grow / block)
        return rows * block, columns * block


@dataclass(frozen=True, slots=True)
class PixtralProcessor:
    """Makes patches of images of nearly any size, for Pixtral: only large ones become smaller."""

    patch_size: int  # pixels of a side
    merge_size: int  # patches of a side of a block that becomes a token
    height: int  # pixels of the largest image
    width: int
    resampling: int = BICUBIC

    def __call__(self, image: Image.Image) -> ProcessedImage:
        """Raises `ImageError` for an image that is too narrow."""
        check_size(*image.size)
        image = resized(image, self.size_of(image.height, image.width), self.resampling)
        grid, patches = cut(image, self.patch_size, self.merge_size)
        rows, columns = (count // self.merge_size for count in grid)
        return ProcessedImage(rows * (columns + 1), grid, patches, digest_of(grid, patches))

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which an image is resized: the next multiples of a block's side, of about the
        same shape and within the largest image.
        """
        block, ratio = self.patch_size * self.merge_size, max(height / self.height, width / self.width)
        if ratio > 1:
            height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
        return math.ceil(height / block) * block, math.ceil(width / block) * block


@dataclass(frozen=True, slots=True)
class SquareProcessor:
    """Makes patches of images that all become squares of one size."""

    patch_size: int  # pixels of a side
    merge_size: int  # patches of a side of a block that becomes a token
    edge: int  # pixels of a side of the square
    resampling: int = BILINEAR

    def __call__(self, image: Image.Image) -> ProcessedImage:
        """Raises `ImageError` for an image that is too narrow."""
        check_size(*image.size)
        image = resized(image, (self.edge, self.edge), self.resampling)
        grid, patches = cut(image, self.patch_size, self.merge_size)
        return ProcessedImage(grid[0] * grid[1] // self.merge_size**2, grid, patches, digest_of(grid, patches))


@dataclass(frozen=True, slots=True)
class CropProcessor:
    """Makes patches of images, and of parts of those that are far from square (Gemma 3's "pan and scan")."""

    square: SquareProcessor  # of the whole image and of each part
    least_edge: int  # pixels of a side of a part
    max_crops: int
    least_ratio: float  # of the longer side to the shorter one

    @property
    def merge_size(self) -> int:
        return self.square.merge_size

    def __call__(self, image: Image.Image) -> ProcessedImage:
        """Raises `ImageError` for an image that is too narrow."""
        whole = self.square(image)
        width, height = image.size
        columns, rows = self.crops_of(width, height)
        if columns * rows == 1:
            return whole
        wide, high = -(-width // columns), -(-height // rows)
        boxes = [(x * wide, y * high) for y in range(rows) for x in range(columns)]
        crops = [image.crop((x, y, min(x + wide, width), min(y + high, height))) for x, y in boxes]
        return replace(whole, crops=tuple(map(self.square, crops)))

    def crops_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows of parts; one of the two is 1. Both are 1 if the image has no parts."""
        longer, shorter = max(width, height), min(width, height)
        if longer / shorter < self.least_ratio:
            return 1, 1
        count = min(longer // self.least_edge, math.floor(longer / shorter + 0.5))
        count = min(max(count, 2), self.max_crops)
        if min(-(-longer // count), shorter) < self.least_edge:
            return 1, 1
        return (count, 1) if width >= height else (1, count)


@dataclass(frozen=True, slots=True)
class TileProcessor:
    """Makes patches of images that are cut into squares of one size, and of the whole image as a further one."""

    patch_size: int  # pixels of a side
    merge_size: int  # patches of a side of a block that becomes a token
    edge: int  # pixels of a side of a tile
    min_tiles: int
    max_tiles: int  # without the whole image
    resampling: int = BICUBIC

    def __call__(self, image: Image.Image) -> ProcessedImage:
        """Raises `ImageError` for an image that is too narrow."""
        import numpy as np

        check_size(*image.size)
        columns, rows = self.tiles_of(*image.size)
        sizes = [(rows * self.edge, columns * self.edge), *[(self.edge, self.edge)][: rows * columns > 1]]
        whole = [np.asarray(resized(image, size, self.resampling)) for size in sizes]
        tiles = whole[0].reshape(rows, self.edge, columns, self.edge, 3).swapaxes(1, 2)
        stacked = np.concatenate([tiles.reshape(-1, self.edge, 3), *whole[1:]])  # one below the other
        grid, patches = cut(stacked, self.patch_size, self.merge_size)
        return ProcessedImage(grid[0] * grid[1] // self.merge_size**2, grid, patches, digest_of(grid, patches))

    def tiles_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows of tiles: those whose shape is nearest to the image's. Of equal ones the last
        counts that the image fills to more than a half.
        """
        sizes = range(1, self.max_tiles + 1)
        shapes = [(x, y) for x in sizes for y in sizes if self.min_tiles <= x * y <= self.max_tiles]
        best, least = (1, 1), math.inf
        for columns, rows in sorted(shapes, key=math.prod):
            distance = abs(width / height - columns / rows)
            is_filled = width * height > 0.5 * self.edge**2 * columns * rows
            if distance < least or (distance == least and is_filled):
                best, least = (columns, rows), distance
        return best


@dataclass(frozen=True, slots=True)
class BudgetProcessor:
    """Makes patches of images that all become about as large: as many tokens as the limit allows, in their shape."""

    patch_size: int  # pixels of a side
    merge_size: int  # patches of a side of a block that becomes a token
    max_tokens: int
    resampling: int = BICUBIC

    def __call__(self, image: Image.Image) -> ProcessedImage:
        """Raises `ImageError` for an image that is too narrow."""
        check_size(*image.size)
        image = resized(image, self.size_of(image.height, image.width), self.resampling)
        grid, patches = cut(image, self.patch_size, self.merge_size)
        return ProcessedImage(grid[0] * grid[1] // self.merge_size**2, grid, patches, digest_of(grid, patches))

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which an image is resized: multiples of a block's side."""
        block = self.patch_size * self.merge_size
        scale = math.sqrt(self.max_tokens * block**2 / (height * width))
        rows, columns = math.floor(scale * height / block), math.floor(scale * width / block)
        if not rows:
            rows, columns = 1, min(width // height, self.max_tokens)
        elif not columns:
            rows, columns = min(height // width, self.max_tokens), 1
        return rows * block, columns * block


@dataclass(frozen=True, slots=True)
class PaddingProcessor:
    """Makes patches of images of nearly any size, for MoonViT: large ones become smaller, black fills up blocks."""

    patch_size: int  # pixels of a side
    merge_size: int  # patches of a side of a block that becomes a token
    max_patches: int  # of an image, without those that are black
    longest_edge: int  # in patches
    resampling: int = BICUBIC

    def __call__(self, image: Image.Image) -> ProcessedImage:
        """Raises `ImageError` for an image that is too narrow."""
        from PIL import Image

        check_size(*image.size)
        height, width = self.size_of(image.height, image.width)
        image, block = resized(image, (height, width), self.resampling), self.patch_size * self.merge_size
        whole = Image.new("RGB", (math.ceil(width / block) * block, math.ceil(height / block) * block))
        whole.paste(image, (0, 0))
        grid, patches = cut(whole, self.patch_size, self.merge_size)
        return ProcessedImage(grid[0] * grid[1] // self.merge_size**2, grid, patches, digest_of(grid, patches))

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which an image is resized, before it is filled up."""
        count, edge = max(1, height // self.patch_size) * max(1, width // self.patch_size), self.longest_edge
        scale = min(1.0, math.sqrt(self.max_patches / count), *(edge * self.patch_size / x for x in (width, height)))
        most = edge * self.patch_size
        return min(max(1, int(height * scale)), most), min(max(1, int(width * scale)), most)


def read_processor(folder: Path, vision: VisionSpec) -> Processor:
    """Return the processor of the model in `folder`, from its preprocessor_config.json. Raises `ModelError`."""
    file = ProcessorFile(folder, *_config(folder), vision)
    if vision.kind != "gemma4":  # whose encoder takes care of colours
        file.check_colours()
    return PROCESSORS[vision.kind](file)


@dataclass(frozen=True, slots=True)
class ProcessorFile:
    """The fields of a preprocessor_config.json."""

    folder: Path
    name: str
    config: dict[str, Any]
    vision: VisionSpec

    def wrong(self, field: str, wanted: Any) -> ModelError:
        """Return an error: a field must be something else."""
        return ModelError(f"{self.folder / self.name}: {field!r} must be {wanted}, got {self.config.get(field)!r}")

    def check_colours(self) -> None:
        """Raise `ModelError` unless the encoder normalises colours as the file says."""
        for field, values in (("image_mean", self.vision.mean), ("image_std", self.vision.std)):
            given = self.config.get(field, values)
            if not isinstance(given, list | tuple) or not _are_close(given, values):
                raise self.wrong(field, f"{list(values)} for this model")

    def resampling(self, default: int = BICUBIC) -> int:
        """Return Pillow's number of the filter. Raises `ModelError`."""
        found = self.config.get("resample", default)
        if type(found) is not int or found not in RESAMPLING:
            raise self.wrong("resample", f"one of {', '.join(map(str, RESAMPLING))}")
        return found


def _qwen(file: ProcessorFile) -> ImageProcessor:
    config, vision = file.config, file.vision
    for field, value in (("patch_size", vision.patch_size), ("merge_size", vision.merge_size)):
        if config.get(field, value) != value:
            raise file.wrong(field, f"{value}, as in config.json")
    sizes = config.get("size") or {}
    low = config.get("min_pixels", sizes.get("shortest_edge", vision.min_pixels))
    high = config.get("max_pixels", sizes.get("longest_edge", vision.max_pixels))
    if type(low) is not int or type(high) is not int or not 0 < low <= high:
        raise file.wrong("size", "an object with 'shortest_edge' and 'longest_edge', numbers of pixels")
    is_glm = vision.kind == "glm"
    frames = 2 if is_glm else 1
    return ImageProcessor(
        vision.patch_size, vision.merge_size, low, high, file.resampling(), frames=frames, grows=is_glm
    )


def _pixtral(file: ProcessorFile) -> PixtralProcessor:
    vision, sizes = file.vision, file.config.get("size") or {}
    edge = sizes.get("longest_edge", vision.longest_edge)
    height, width = sizes.get("height", edge), sizes.get("width", edge)
    if type(height) is not int or type(width) is not int or min(height, width) < 1:
        raise file.wrong("size", "an object with 'longest_edge', a number of pixels")
    return PixtralProcessor(vision.patch_size, vision.merge_size, height, width, file.resampling())


def _square(file: ProcessorFile) -> SquareProcessor:
    vision, sizes = file.vision, file.config.get("size") or {}
    assert vision.tile is not None
    edge = vision.tile[0] * vision.patch_size
    if type(sizes) is int:  # as old files say
        sizes = {"height": sizes}
    if any(sizes.get(side, edge) != edge for side in ("height", "width")):
        raise file.wrong("size", f"{edge} x {edge} pixels, as in config.json")
    return SquareProcessor(vision.patch_size, vision.merge_size, edge, file.resampling(BILINEAR))


def _square_and_crops(file: ProcessorFile) -> SquareProcessor | CropProcessor:
    square, config = _square(file), file.config
    if not config.get("do_pan_and_scan"):
        return square
    edge, most = config.get("pan_and_scan_min_crop_size") or 256, config.get("pan_and_scan_max_num_crops") or 4
    ratio = config.get("pan_and_scan_min_ratio_to_activate") or 1.2
    if type(edge) is not int or edge < 1:
        raise file.wrong("pan_and_scan_min_crop_size", "a number of pixels")
    if type(most) is not int or not 2 <= most <= MAX_TILES:
        raise file.wrong("pan_and_scan_max_num_crops", f"a number from 2 to {MAX_TILES}")
    if not isinstance(ratio, int | float) or ratio < 1:
        raise file.wrong("pan_and_scan_min_ratio_to_activate", "a number of at least 1")
    return CropProcessor(square, edge, most, float(ratio))


def _budget(file: ProcessorFile) -> BudgetProcessor:
    vision = file.vision
    for field, value in (("patch_size", vision.patch_size), ("pooling_kernel_size", vision.merge_size)):
        if file.config.get(field, value) != value:
            raise file.wrong(field, f"{value}, as in config.json")
    return BudgetProcessor(vision.patch_size, vision.merge_size, _max_tokens(file), file.resampling())


def _max_tokens(file: ProcessorFile) -> int:
    most = file.config.get("max_soft_tokens", file.vision.max_tokens)
    if type(most) is not int or not 0 < most <= file.vision.max_tokens:
        raise file.wrong("max_soft_tokens", f"a number up to {file.vision.max_tokens}, as config.json says")
    return most


def _large_patches(file: ProcessorFile) -> BudgetProcessor:
    """Return the processor of a model whose patches are the blocks of other models."""
    patch, pooled = (file.config.get(name) for name in ("patch_size", "pooling_kernel_size"))
    if patch is not None and pooled is not None and patch * pooled != file.vision.patch_size:
        raise file.wrong("patch_size", f"such that blocks have {file.vision.patch_size} pixels, as in config.json")
    return BudgetProcessor(file.vision.patch_size, 1, _max_tokens(file), file.resampling())


def _padding(file: ProcessorFile) -> PaddingProcessor:
    config, vision = file.config, file.vision
    for field, value in (("patch_size", vision.patch_size), ("merge_size", vision.merge_size)):
        if config.get(field, value) != value:
            raise file.wrong(field, f"{value}, as in config.json")
    names, most = ("in_token_limit", "in_patch_limit", "max_patches"), vision.max_tokens * vision.merge_size**2
    name = next((name for name in names if config.get(name) is not None), names[0])
    limit, edge = config.get(name, most), config.get("patch_limit_on_one_side")
    edge = (config.get("size") or {}).get("max_height", 512) if edge is None else edge
    for field, value in ((name, limit), ("patch_limit_on_one_side", edge)):
        if type(value) is not int or value < 1:
            raise file.wrong(field, "a number of patches")
    if config.get("fixed_output_tokens") is not None or config.get("pad_input") is False:
        raise file.wrong("pad_input", "true, and 'fixed_output_tokens' null")
    return PaddingProcessor(vision.patch_size, vision.merge_size, limit, edge, file.resampling())


def _tiles(file: ProcessorFile) -> TileProcessor:
    square = _square(file)
    limits = zip(("min_patches", "max_patches"), file.vision.num_tiles, strict=True)
    low, high = (file.config.get(name, default) for name, default in limits)
    if type(low) is not int or type(high) is not int or not 0 < low <= high <= MAX_TILES:
        raise file.wrong("max_patches", f"a number of tiles up to {MAX_TILES}, at least 'min_patches'")
    return TileProcessor(square.patch_size, square.merge_size, square.edge, low, high, file.resampling())


PROCESSORS: dict[str, Callable[[ProcessorFile], Processor]] = {
    "qwen": _qwen,
    "qwen2": _qwen,
    "pixtral": _pixtral,
    "siglip": _square_and_crops,
    "intern": _tiles,
    "intern_chat": _tiles,
    "glm": _qwen,
    "gemma4": _budget,
    "gemma4_unified": _large_patches,
    "kimi_vl": _padding,
    "kimi_k25": _padding,
}


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
            own = found.get("media_proc_cfg")  # of Kimi K2.5
            return name, found | own if isinstance(own, dict) else found
    return FILES[0], {}
