"""Images of requests, ready for the engine: each file is decoded once, however many requests have it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast
from weakref import finalize

from engine.core.engine_request import ImageInput
from engine.vision.decode import ImageError, decode, to_rgb
from engine.vision.held_bytes import HeldBytes
from engine.vision.processors import ProcessedImage, Processor
from engine.vision.sources import ImageSource, Media
from engine.vision.videos import Frames, ProcessedVideo, VideoProcessor, frames_of_files

if TYPE_CHECKING:
    from PIL import Image

Picture: TypeAlias = ProcessedImage | ProcessedVideo
T = TypeVar("T", ProcessedImage, ProcessedVideo)
MAX_CACHED_BYTES = 256 << 20  # patches of images that are kept for other requests
MAX_HELD_BYTES = 2 << 30  # of the images of all unfinished requests; see `HeldBytes` for each caller's part


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
    video_id: int | None = None  # for each token of a video; None: the model reads none
    video_texts: tuple[str, ...] = ()  # that stand for two frames: before them, for each token, behind them

    def marker_of(self, image: ProcessedImage) -> int:
        """Return the token that stands for an image in a prompt before it is placed."""
        if image.num_frames > 1:
            assert self.video_id is not None
            return self.video_id
        return self.token_id if self.marker_id is None else self.marker_id

    def tokens(self, image: ProcessedImage) -> list[int]:
        """Return the tokens of an image, without those before and behind it."""
        if self.row_ends is None:
            return [self.marker_of(image) if image.num_frames > 1 else self.token_id] * image.num_tokens
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
        video_processor: VideoProcessor | None = None,
    ) -> None:
        """token_id: that stands for a token of an image. text: that stands for an image. max_images: of a prompt.
        layout: None: a prompt has only these tokens for an image, and one of them where it is to stand.
        video_processor: None: the model reads no videos.
        """
        self.processor, self.text, self.max_images = processor, text, max_images
        self.video_processor = video_processor
        self.num_hits = self.num_loads = 0  # of the files that requests brought
        self.max_cached_bytes, self.max_held_bytes = MAX_CACHED_BYTES, MAX_HELD_BYTES
        self.held = HeldBytes()  # patches of requests that are being read, and of prompts that are not forgotten yet
        self._media, self._layout = media, layout or ImageLayout(token_id)
        self._lock = Lock()
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()  # by the file's hash, the oldest use first
        self._num_bytes = 0
        self._loading: dict[bytes, Future[Picture]] = {}

    def share(self, num_processes: int) -> None:
        """Take this process's part of the memory for images: so many processes have loaders of the same model."""
        self.max_cached_bytes = MAX_CACHED_BYTES // num_processes
        self.max_held_bytes = MAX_HELD_BYTES // num_processes

    def load(self, source: ImageSource) -> Picture:
        """Return an image or a video, ready for the engine. May take a second, or several for a remote file.

        Raises `ImageError`.
        """
        if not source.is_video:
            return self.load_file(self.read(source))
        return self.load_video(*self._media.read_frames(source, self._videos().max_frames))

    def load_read(self, source: ImageSource, data: bytes) -> Picture:
        """Return an image or a video whose file was read. Raises `ImageError`."""
        return self.load_video([data]) if source.is_video else self.load_file(data)

    def read(self, source: ImageSource) -> bytes:
        """Return the bytes of an image's file. Raises `ImageError`."""
        return self._media.read(source)

    def load_file(self, data: bytes) -> ProcessedImage:
        """Decode an image's file, unless it is kept; wait if another thread decodes it. Raises `ImageError`."""
        return self._once(hashlib.sha256(data).digest(), lambda: self.processor(decode(data)))

    def load_video(self, files: Sequence[bytes], rate: float | None = None) -> ProcessedVideo:
        """Return a video of one animated file, or of pictures, `rate` a second: once, as `load_file`. Raises
        `ImageError`.
        """
        processor = self._videos()
        key = hashlib.sha256(f"video {rate} {[len(file) for file in files]}".encode())
        for file in files:
            key.update(file)
        return self._once(key.digest(), lambda: processor(frames_of_files(files, rate, processor)))

    def load_frames(self, frames: Frames) -> ProcessedVideo:
        """Return a video whose frames were decoded elsewhere. Raises `ImageError`."""
        return self._videos()(frames)

    def _videos(self) -> VideoProcessor:
        if self.video_processor is None:
            raise ImageError("this model reads no videos: send pictures")
        return self.video_processor

    def _once(self, key: bytes, make: Callable[[], T]) -> T:
        """Return what is kept by a key, or make it; wait if another thread does."""
        with self._lock:
            self.num_loads += 1
            if (kept := self._kept.get(key)) is not None:
                self.num_hits += 1
                self._kept.move_to_end(key)
                return cast(T, kept)
            is_first = (result := self._loading.get(key)) is None
            if result is None:
                result = self._loading[key] = Future()
            else:
                self.num_hits += 1
        if is_first:
            self._make(key, make, result)
        try:
            return cast(T, result.result())
        finally:
            del result  # it holds an error, whose traceback holds this frame: memory of pixels until garbage collection

    def load_image(self, image: Image.Image) -> ProcessedImage:
        """Return an image that has been decoded elsewhere."""
        return self.processor(to_rgb(image))

    def check_count(self, num_images: int) -> None:
        """Raise `ImageError` if a prompt may not have so many images."""
        if num_images > self.max_images:
            raise ImageError(f"the prompt has {num_images} images; at most {self.max_images} are taken")

    def written(self, text: str, pictures: Sequence[Picture]) -> str:
        """Return a prompt's text as the model's processor completes it before it is tokenised: with margins around each
        image, its crops, and the times and pairs of each video's frames. In it, each of `pictures` has the image's
        text.

        Raises `ImageError` if there are more or fewer.
        """
        layout = self._layout
        if any(isinstance(each, ProcessedVideo) or each.crops for each in pictures):
            parts = text.split(self.text)
            if len(parts) != len(pictures) + 1:
                raise ImageError(f"the prompt has {len(parts) - 1} placeholders for {len(pictures)} images and videos")
            shown = [self._text_of(each) for each in pictures]
            text = "".join(part + own for part, own in zip(parts, [*shown, ""], strict=True))
        if not layout.margin or not layout.marker:
            return text
        return text.replace(layout.marker, f"{layout.margin}{layout.marker}{layout.margin}")

    def _text_of(self, picture: Picture) -> str:
        if isinstance(picture, ProcessedImage):
            if not picture.crops:
                return self.text
            crops = " ".join([self.text] * len(picture.crops))
            return f"Here is the original image {self.text} and here are some crops to help you see better {crops}"
        before, pad, behind = self._layout.video_texts
        if not picture.seconds:
            return before + pad * len(picture.pairs) + behind
        return "".join(f"<{seconds:.1f} seconds>{before}{pad}{behind}" for seconds in picture.seconds)

    def place(self, token_ids: Sequence[int], pictures: Sequence[Picture], caller: str = "") -> PromptWithImages:
        """Return the prompt with as many placeholders for each image as it has tokens. Each image, and each pair of a
        video's frames, has one in `token_ids`. `caller`: who holds their memory.

        Raises `ImageError` if there are more or fewer.
        """
        layout = self._layout
        images = images_in(pictures)
        markers = {layout.token_id if layout.marker_id is None else layout.marker_id}
        if layout.video_id is not None:
            markers.add(layout.video_id)
        indices = [index for index, token in enumerate(token_ids) if token in markers]
        if [token_ids[index] for index in indices] != [layout.marker_of(image) for image in images]:
            raise ImageError(f"the prompt has {len(indices)} placeholders for {len(images)} images")
        found: list[int] = []
        names: list[int] = []
        placed: list[ImageInput] = []
        begin = 0
        for image, at in zip(images, indices, strict=True):
            for each in (found, names):
                each += [*token_ids[begin:at], *layout.before]
            given = image.num_tokens, image.grid, image.patches, image.digest
            own = ImageInput(len(found), *given, layout.sees_both_ways, image.num_frames, image.moment)
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

    def _make(self, key: bytes, make: Callable[[], Picture], result: Future[Picture]) -> None:
        """Make an image or a video for all threads that wait for `result`."""
        try:
            picture = make()
        except BaseException as error:
            with self._lock:
                del self._loading[key]
            result.set_exception(error)
            del result  # see `_once`
            return
        with self._lock:
            del self._loading[key]
            self._kept[key] = picture
            self._num_bytes += picture.num_bytes
            while self._num_bytes > self.max_cached_bytes:
                self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes
        result.set_result(picture)


def images_in(pictures: Sequence[Picture]) -> list[ProcessedImage]:
    """Return the images, with crops, and the pairs of frames of videos, in order."""
    return [
        image
        for each in pictures
        for image in (each.pairs if isinstance(each, ProcessedVideo) else (each, *each.crops))
    ]


def token_names(image: ProcessedImage) -> list[int]:
    """Return a name in the prefix cache for each token of an image: 62 bits that follow from its content, and a 63rd by
    which no token id is equal.
    """
    import numpy as np

    stream = hashlib.shake_256(bytes.fromhex(image.digest)).digest(8 * image.num_tokens)
    names: list[int] = (np.frombuffer(stream, np.uint64) >> np.uint64(2) | np.uint64(1 << 62)).tolist()
    return names
