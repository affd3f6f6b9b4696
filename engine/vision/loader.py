"""Images of requests, ready for the engine: each file is decoded once, however many requests have it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING
from weakref import finalize

from engine.core.engine_request import ImageInput
from engine.vision.decode import ImageError, decode, to_rgb
from engine.vision.held_bytes import HeldBytes
from engine.vision.processors import ProcessedImage, Processor
from engine.vision.sources import ImageSource, Media

if TYPE_CHECKING:
    from PIL import Image

MAX_CACHED_BYTES = 256 << 20  # patches of images that are kept for other requests


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The tokens that a prompt has for an image."""

    token_id: int  # for each token of the encoder
    marker_id: int | None = None  # where an image is to stand; None: `token_id`
    before: tuple[int, ...] = ()  # each image, and behind it
    behind: tuple[int, ...] = ()
    row_ends: tuple[int, int] | None = None  # behind each row of an image, and behind its last one
    merge_size: int = 1  # rows of patches of a row of tokens
    marker: str = ""  # the text of `marker_id`
    margin: str = ""  # text that is written before each image and behind it
    sees_both_ways: bool = False  # see `ImageInput`

    def tokens(self, image: ProcessedImage) -> list[int]:
        """Return the tokens of an image, without those before and behind it."""
        if self.row_ends is None:
            return [self.token_id] * image.num_tokens
        num_rows = image.grid[0] // self.merge_size
        row = [self.token_id] * (image.num_tokens // num_rows - 1) + [self.row_ends[0]]
        return [*(row * num_rows)[:-1], self.row_ends[1]]


@dataclass(frozen=True, slots=True)
class PromptWithImages:
    """A prompt in which every placeholder stands for a token of an image."""

    token_ids: list[int]
    name_ids: list[int]  # see `EngineRequest`
    images: tuple[ImageInput, ...]


class ImageLoader:
    """Loads images for one model. Thread-safe."""

    def __init__(
        self,
        processor: Processor,
        media: Media,
        token_id: int,
        text: str,
        max_images: int,
        layout: ImageLayout | None = None,
    ) -> None:
        """token_id: that stands for a token of an image. text: that stands for an image. max_images: of a prompt.
        layout: None: a prompt has only these tokens for an image, and one of them where it is to stand.
        """
        self.processor, self.text, self.max_images = processor, text, max_images
        self.num_hits = self.num_loads = 0  # of the files that requests brought
        self.held = HeldBytes()  # patches of requests that are being read, and of prompts that are not forgotten yet
        self._media, self._layout = media, layout or ImageLayout(token_id)
        self._lock = Lock()
        self._kept: OrderedDict[bytes, ProcessedImage] = OrderedDict()  # by the file's hash, the oldest use first
        self._num_bytes = 0
        self._loading: dict[bytes, Future[ProcessedImage]] = {}

    def load(self, source: ImageSource) -> ProcessedImage:
        """Return an image, ready for the engine. May take a second, or several for a remote file.

        Raises `ImageError`.
        """
        return self.load_file(self.read(source))

    def read(self, source: ImageSource) -> bytes:
        """Return the bytes of an image's file. Raises `ImageError`."""
        return self._media.read(source)

    def load_file(self, data: bytes) -> ProcessedImage:
        """Decode a file, unless it is kept; wait if another thread decodes it. Raises `ImageError`."""
        key = hashlib.sha256(data).digest()
        with self._lock:
            self.num_loads += 1
            if (kept := self._kept.get(key)) is not None:
                self.num_hits += 1
                self._kept.move_to_end(key)
                return kept
            is_first = (result := self._loading.get(key)) is None
            if result is None:
                result = self._loading[key] = Future()
            else:
                self.num_hits += 1
        if is_first:
            self._decode(key, data, result)
        return result.result()

    def load_image(self, image: Image.Image) -> ProcessedImage:
        """Return an image that has been decoded elsewhere."""
        return self.processor(to_rgb(image))

    def check_count(self, num_images: int) -> None:
        """Raise `ImageError` if a prompt may not have so many images."""
        if num_images > self.max_images:
            raise ImageError(f"the prompt has {num_images} images; at most {self.max_images} are taken")

    def with_margins(self, text: str) -> str:
        """Return a prompt's text with what the model's processor writes around each image, before it is tokenised."""
        layout = self._layout
        if not layout.margin or not layout.marker:
            return text
        return text.replace(layout.marker, f"{layout.margin}{layout.marker}{layout.margin}")

    def place(self, token_ids: Sequence[int], images: Sequence[ProcessedImage], caller: str = "") -> PromptWithImages:
        """Return the prompt with as many placeholders for each image as it has tokens. Each has one in `token_ids`.
        `caller`: who holds their memory.

        Raises `ImageError` if there are more or fewer.
        """
        layout = self._layout
        marker = layout.token_id if layout.marker_id is None else layout.marker_id
        if (count := token_ids.count(marker)) != len(images):
            raise ImageError(f"the prompt has {count} placeholders for {len(images)} images")
        found: list[int] = []
        names: list[int] = []
        placed: list[ImageInput] = []
        begin = 0
        for image in images:
            at = token_ids.index(marker, begin)
            for each in (found, names):
                each += [*token_ids[begin:at], *layout.before]
            given = image.num_tokens, image.grid, image.patches, image.digest
            own = ImageInput(len(found), *given, sees_both_ways=layout.sees_both_ways)
            placed.append(self._held(own, caller))
            found += [*layout.tokens(image), *layout.behind]
            names += [*token_names(image), *layout.behind]
            begin = at + 1
        return PromptWithImages([*found, *token_ids[begin:]], [*names, *token_ids[begin:]], tuple(placed))

    def _held(self, image: ImageInput, caller: str) -> ImageInput:
        """Count an image's bytes as long as a prompt has it."""
        self.held.add(caller, len(image.patches))
        finalize(image, self.held.add, caller, -len(image.patches)).atexit = False
        return image

    def _decode(self, key: bytes, data: bytes, result: Future[ProcessedImage]) -> None:
        """Decode a file for all threads that wait for `result`."""
        try:
            image = self.processor(decode(data))
        except BaseException as error:
            with self._lock:
                del self._loading[key]
            result.set_exception(error)
            return
        with self._lock:
            del self._loading[key]
            self._kept[key] = image
            self._num_bytes += len(image.patches)
            while self._num_bytes > MAX_CACHED_BYTES:
                self._num_bytes -= len(self._kept.popitem(last=False)[1].patches)
        result.set_result(image)


def token_names(image: ProcessedImage) -> list[int]:
    """Return a name in the prefix cache for each token of an image: 62 bits that follow from its content, and a 63rd by
    which no token id is equal.
    """
    import numpy as np

    stream = hashlib.shake_256(bytes.fromhex(image.digest)).digest(8 * image.num_tokens)
    names: list[int] = (np.frombuffer(stream, np.uint64) >> np.uint64(2) | np.uint64(1 << 62)).tolist()
    return names
