"""Decodes image files of unknown origin: PNG, JPEG, WebP and the first frame of GIF."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Pillow and NumPy are imported where they are used: a server of texts does without them
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 32 << 20  # of a file
MAX_PIXELS = 50_000_000  # of a phone's largest photograph
MAX_RATIO = 200  # of the longer side to the shorter one
_ORIENTATION = 0x0112  # EXIF tag


class ImageError(ValueError):
    """An image cannot be used. The message says why, and is to follow "image 1: " or the like."""


def decode(data: bytes) -> Image.Image:
    """Decode the first frame of a file, as a camera's EXIF data turns it, to RGB; what is transparent becomes white.

    Size and shape are checked before pixels are decoded. Raises `ImageError`.
    """
    with _opened(data) as image:
        image.load()
        return to_rgb(_turned(image))


def size_of_file(data: bytes) -> tuple[int, int]:
    """Return the width and height of a file, whose pixels are not decoded. Raises `ImageError`."""
    with _opened(data) as image:
        width, height = image.size
        return width, height


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """Open a file whose size and shape are taken. Errors in the block become `ImageError`."""
    from PIL import Image

    if len(data) > MAX_BYTES:
        raise ImageError(f"the file has {len(data) >> 20} MiB; at most {MAX_BYTES >> 20} are taken")
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            check_size(*image.size)
            yield image
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise ImageError("it is no PNG, JPEG, WebP or GIF file") from None
    except Image.DecompressionBombError:
        raise ImageError(f"it has too many pixels; at most {MAX_PIXELS:,} are taken") from None
    except Exception as error:  # decoders raise errors of many types for files that are damaged
        raise ImageError(f"the file is damaged: {str(error)[:200] or type(error).__name__}") from None


def check_size(width: int, height: int) -> None:
    """Raise `ImageError` for an image that is empty, too large or too narrow."""
    if min(width, height) < 1:
        raise ImageError(f"it has {width} x {height} pixels: it is empty")
    if width * height > MAX_PIXELS:
        raise ImageError(f"it has {width} x {height} pixels; at most {MAX_PIXELS:,} are taken")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError(f"it has {width} x {height} pixels; one side may be at most {MAX_RATIO} times the other")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB; what is transparent becomes white."""
    import numpy as np
    from PIL import Image

    if image.mode in ("I;16", "I;16B", "I;16L", "I;16N", "I"):
        return Image.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        return Image.fromarray(np.nan_to_num(np.asarray(image)).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _turned(image: Image.Image) -> Image.Image:
    """Return the image as its EXIF data orients it. Data that cannot be read say nothing."""
    from PIL import ImageOps

    try:
        orientation: Any = image.getexif().get(_ORIENTATION)
    except Exception:
        return image
    if orientation in range(2, 9):
        return ImageOps.exif_transpose(image)
    return image
