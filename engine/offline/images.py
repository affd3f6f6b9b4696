"""Images as `LLM` takes them: Pillow's images, paths, bytes and URLs, in messages or beside a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from engine.text.image_marks import marked
from engine.vision import decode
from engine.vision.decode import ImageError
from engine.vision.loader import ImageLoader, Picture
from engine.vision.sources import ImageSource
from engine.vision.videos import frames_at

_KINDS = "a Pillow image, a path, the bytes of a file, or a URL"


class Given:
    """An image in a message, as the caller gave it."""

    def __init__(self, image: Any) -> None:
        self.image = image


@dataclass(frozen=True, slots=True)
class GivenVideo:
    """A video in a message: a file as of an image, or a list of images, one a frame."""

    video: Any
    rate: Any = None  # frames of a list a second; None: 2


def take_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Return messages in which marks stand for images, and the images in order. Raises `ValueError`."""
    found: list[Mapping[str, Any]] = []
    images: list[Any] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(_image_of(part) is not None for part in content):
            text, own = marked(_parts(content), len(images))
            message = {**message, "content": text}
            images += [each.image for each in own]
        found.append(message)
    return found, images


def _parts(content: Sequence[Any]) -> Iterator[str | Given]:
    for part in content:
        image = _image_of(part)
        if image is not None:
            yield image
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"]


def _image_of(part: Any) -> Given | None:
    if not isinstance(part, Mapping):
        return None
    match part.get("type"):
        case "image_url":
            url = part.get("image_url")
            return Given(url.get("url") if isinstance(url, Mapping) else url)
        case "image" | "image_pil" as kind:
            return Given(part.get(kind))
        case "video_url":
            url = part.get("video_url")
            return Given(GivenVideo(url.get("url") if isinstance(url, Mapping) else url))
        case "video":
            return Given(GivenVideo(part.get("video"), part.get("fps")))
    return None


def load_all(loader: ImageLoader | None, given: Any) -> list[Picture]:
    """Load one image or several. Raises `ImageError`, which names the image that is at fault."""
    each = list(given) if isinstance(given, list | tuple) else [given]
    if loader is None:
        raise ImageError("this model, as it is loaded here, reads text only: leave the images out")
    loader.check_count(len(each))
    found = []
    for number, image in enumerate(each, 1):
        try:
            found.append(_load(loader, image))
        except ImageError as error:
            raise ImageError(f"image {number}: {error}") from None
    return found


def _load(loader: ImageLoader, image: Any) -> Picture:
    if isinstance(image, GivenVideo):
        return _load_video(loader, image)
    if isinstance(image, Image.Image):
        return loader.load_image(image)
    if isinstance(image, str) and ":" in image[:8]:
        return loader.load(ImageSource(image))
    return loader.load_file(_file(image))


def _load_video(loader: ImageLoader, given: GivenVideo) -> Picture:
    video, rate = given.video, given.rate
    if rate is not None and (not isinstance(rate, int | float) or not 0 < rate <= 1000):
        raise ImageError(f"'fps' must be a number of frames a second, got {rate!r}")
    if isinstance(video, list | tuple):
        images = [each if isinstance(each, Image.Image) else decode.decode(_file(each)) for each in video]
        return loader.load_frames(frames_at(images, rate))
    if isinstance(video, str) and ":" in video[:8]:
        return loader.load(ImageSource(video, is_video=True))
    return loader.load_video([_file(video)], rate)


def _file(given: Any) -> bytes:
    """Return the bytes of a file that is given by itself or by its path."""
    if isinstance(given, bytes):
        return given
    if not isinstance(given, str | Path):
        raise ImageError(f"it must be {_KINDS}, got {type(given).__name__}")
    try:
        with Path(given).expanduser().open("rb") as file:
            return file.read(decode.MAX_BYTES + 1)
    except OSError as error:
        raise ImageError(f"{given} cannot be read: {error.strerror}") from None
