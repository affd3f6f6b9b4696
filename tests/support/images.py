"""Images for tests, and loaders of them."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engine.vision.loader import ImageLayout, ImageLoader
from engine.vision.processors import ImageProcessor
from engine.vision.sources import Media

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A smooth picture with noise, so that resizing has both to keep."""
    rng = np.random.default_rng(width * 1000 + height)
    x, y = np.meshgrid(np.linspace(0, 6, width), np.linspace(0, 9, height))
    waves = np.stack([np.sin(x + phase) * np.cos(y * (phase + 1)) for phase in range(3)], -1)
    pixels = 127 + 90 * waves + rng.normal(0, 25, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, format, **({"lossless": True} if format == "WEBP" else {}), **options)
    return file.getvalue()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{in_base64(data)}"


def loader(
    token_id: int, text: str, *, max_images: int = 3, folder: Path | None = None, layout: ImageLayout | None = None
) -> ImageLoader:
    """A loader for patches of 4 x 4 pixels, 2 x 2 of which are a token."""
    return ImageLoader(ImageProcessor(4, 2, 256, 1024), Media((), folder), token_id, text, max_images, layout)
