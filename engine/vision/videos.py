"""Videos as frames: animated files and lists of pictures, sampled, resized and cut into pairs of frames.

Two successive frames are read as one picture of two frames. Its time stands before it in the prompt, or counts in its
positions (Qwen2.5-VL). Formats whose frames Pillow cannot read, such as MP4, are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine.models.errors import ModelError
from engine.models.spec import VisionSpec
from engine.utils.folder_files import read_file
from engine.vision.decode import FORMATS, MAX_BYTES, ImageError, check_size, decode, size_of_file, to_rgb
from engine.vision.processors import (
    BICUBIC,
    MAX_FILE_BYTES,
    ImageProcessor,
    ProcessedImage,
    cut,
    digest_of,
    resized,
)

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")
FILE, IMAGE_FILE = "video_preprocessor_config.json", "preprocessor_config.json"
PIXELS = 4096, 25_165_824  # of a video, where the checkpoint does not say
OLDER_PIXELS = 128 * 28 * 28, 768 * 28 * 28  # of each frame, as transformers takes them
MAX_PIXELS = 200_000_000  # of all frames before they are resized: some 600 MB while a video is cut into patches
MAX_SOURCE_FRAMES = 10_000  # in a file; some of them are read
FRAMES_PER_SECOND = 2.0  # that are read, and of pictures whose rate is not given
LEAST_RATE = 1e-6  # no video has so few frames a second and fits
DEFAULT_MS = 100  # a frame of a file that does not say how long it is shown, as browsers take it
HINT = "send its frames: data:video/jpeg;base64,FRAME,FRAME,… or an animated GIF, WebP or PNG file"


@dataclass(frozen=True, slots=True)
class ProcessedVideo:
    """A video as the model reads it: pairs of frames, and the time in seconds that is written before each."""

    pairs: tuple[ProcessedImage, ...]
    seconds: tuple[float, ...]  # empty: the pairs follow each other without texts

    @property
    def num_tokens(self) -> int:
        """Tokens of the frames, without those of times."""
        return sum(pair.num_tokens for pair in self.pairs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the patches."""
        return sum(pair.num_bytes for pair in self.pairs)


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames of a video and the times at which they are shown, in seconds."""

    images: Sequence[Image.Image]
    seconds: Sequence[float]
    rate: float = FRAMES_PER_SECOND  # frames a second, on average


@dataclass(frozen=True, slots=True)
class VideoProcessor:
    """Makes pairs of frames as Qwen3-VL's and Qwen3.5's processor does, with Pillow's filters."""

    patch_size: int
    merge_size: int
    min_pixels: int = 4096  # of all frames together
    max_pixels: int = 25_165_824
    min_frames: int = 4
    max_frames: int = 768
    rate: float = FRAMES_PER_SECOND  # frames a second that are read
    resampling: int = BICUBIC
    time_steps: float = 0.0  # see `VisionSpec`

    def __call__(self, frames: Frames) -> ProcessedVideo:
        """Raises `ImageError` for frames that differ in size or are too narrow."""
        images, seconds = list(frames.images), list(frames.seconds)
        sizes = {image.size for image in images}
        if len(sizes) != 1:
            raise ImageError("its frames differ in size")
        if len(images) > self.max_frames:
            raise ImageError(f"it has {len(images)} frames; at most {self.max_frames} are taken")
        width, height = sizes.pop()
        check_size(width, height)
        size = self.size_of(len(images), height, width)
        if len(images) % 2:
            images, seconds = [*images, images[-1]], [*seconds, seconds[-1]]
        cuts = [cut(resized(image, size, self.resampling), self.patch_size, self.merge_size) for image in images]
        grid = cuts[0][0]
        pairs: list[ProcessedImage] = []
        for (_, first), (_, second) in zip(cuts[::2], cuts[1::2], strict=True):
            patches, moment = first + second, self.moment_of(len(pairs), frames.rate)
            count = grid[0] * grid[1] // self.merge_size**2
            pairs.append(ProcessedImage(count, grid, patches, digest_of(grid, patches, moment), 2, moment))
        if self.time_steps:
            check_moments(pairs)
            return ProcessedVideo(tuple(pairs), ())
        return ProcessedVideo(
            tuple(pairs), tuple((a + b) / 2 for a, b in zip(seconds[::2], seconds[1::2], strict=True))
        )

    def moment_of(self, index: int, rate: float) -> int | None:
        """Return the time of a pair of frames in positions, at `rate` frames a second; None: positions have none."""
        return int(index * (2 / max(rate, LEAST_RATE) * self.time_steps)) if self.time_steps else None

    def size_of(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which each frame is resized: multiples of a block's side, so that all frames
        together have pixels within the limits.
        """
        block = self.patch_size * self.merge_size
        if min(height, width) < block:
            scale = max(block / height, block / width)
            height, width = int(height * scale), int(width * scale)
        rows, columns, frames = round(height / block), round(width / block), max(round(num_frames / 2) * 2, 2)
        if frames * rows * columns * block**2 > self.max_pixels:
            shrink = math.sqrt(num_frames * height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / block))
            columns = max(1, math.floor(width / shrink / block))
        elif frames * rows * columns * block**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (num_frames * height * width))
            rows, columns = math.ceil(height * grow / block), math.ceil(width * grow / block)
        return rows * block, columns * block

    def sampled(self, num_frames: int, rate: float) -> list[int]:
        """Return the indexes of the frames that are read of a file with `rate` frames a second."""
        wanted = min(max(int(num_frames / rate * self.rate), self.min_frames), self.max_frames, num_frames)
        if wanted < 2:
            return [0]
        return [round(i * (num_frames - 1) / (wanted - 1)) for i in range(wanted)]


@dataclass(frozen=True, slots=True)
class OlderVideoProcessor(VideoProcessor):
    """Makes pairs of frames as Qwen2.5-VL's processor does: `min_pixels` and `max_pixels` are those of each frame."""

    def size_of(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        return ImageProcessor(self.patch_size, self.merge_size, self.min_pixels, self.max_pixels).size_of(height, width)

    def sampled(self, num_frames: int, rate: float) -> list[int]:
        wanted = min(max(num_frames / rate * self.rate, self.min_frames), self.max_frames, num_frames)
        count = int(wanted) // 2 * 2
        return [i * num_frames // count for i in range(count)] if count else [0]


def check_moments(pairs: Sequence[ProcessedImage]) -> None:
    """Raise `ImageError` if the time of a video takes more positions than it has tokens: an engine has no more rows of
    positions than a prompt may have tokens.
    """
    if (pairs[-1].moment or 0) >= sum(pair.num_tokens for pair in pairs):
        raise ImageError("its frames are too small for the time between them: send more a second, or larger ones")


def read_video_processor(folder: Path, vision: VisionSpec) -> VideoProcessor | None:
    """Return the processor of the model in `folder`; None: it reads no videos. Raises `ModelError`."""
    if vision.video_token_id is None:
        return None
    config: dict[str, Any] = {}
    file = folder / FILE
    if vision.is_older and not file.is_file():
        file = folder / IMAGE_FILE  # as transformers reads it: the limits of an image are those of each frame
    if file.is_file():
        try:
            config = json.loads(read_file(file, folder, MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from None
    sizes = config.get("size") or {}
    low, high = OLDER_PIXELS if vision.is_older else PIXELS
    low, high = sizes.get("shortest_edge", low), sizes.get("longest_edge", high)
    if vision.is_older:
        low, high = config.get("min_pixels") or low, config.get("max_pixels") or high
    frames = config.get("min_frames", 4), config.get("max_frames", 768)
    if not all(type(each) is int and each > 0 for each in (low, high, *frames)) or low > high or frames[0] > frames[1]:
        raise ModelError(f"{file}: 'size', 'min_frames' and 'max_frames' must be positive numbers, in order")
    rate = config.get("fps", FRAMES_PER_SECOND)
    if not isinstance(rate, int | float) or not 0 < rate <= 1000:
        raise ModelError(f"{file}: 'fps' must be a number of frames a second, got {rate!r}")
    kind = OlderVideoProcessor if vision.is_older else VideoProcessor
    return kind(vision.patch_size, vision.merge_size, low, high, *frames, float(rate), time_steps=vision.time_steps)


def frames_of_files(files: Sequence[bytes], rate: float | None, processor: VideoProcessor) -> Frames:
    """Decode one animated file, or pictures of the same size, one a frame. rate: of the pictures, in frames a second;
    None: as many as are read of a file.

    Raises `ImageError`.
    """
    if len(files) == 1:
        return _frames_of_file(files[0], processor)
    if len(files) > processor.max_frames:
        raise ImageError(f"it has {len(files)} frames; at most {processor.max_frames} are taken")
    for file in files:
        _check_pixels(len(files), *_of_frame(size_of_file, file, files))
    return frames_at([_of_frame(decode, file, files) for file in files], rate)


def _of_frame(read: Callable[[bytes], T], file: bytes, files: Sequence[bytes]) -> T:
    """Call a function for a frame's file. An `ImageError` then says which frame it is."""
    try:
        return read(file)
    except ImageError as error:
        raise ImageError(f"frame {files.index(file) + 1}: {error}") from None


def frames_at(images: Sequence[Image.Image], rate: float | None) -> Frames:
    """Return pictures as frames, `rate` a second. Raises `ImageError` if there is none, or too many pixels."""
    if not images:
        raise ImageError("it has no frames")
    _check_pixels(len(images), *images[0].size)
    rate = rate or FRAMES_PER_SECOND
    return Frames([to_rgb(image) for image in images], [i / rate for i in range(len(images))], rate)


def _check_pixels(num_frames: int, width: int, height: int) -> None:
    check_size(width, height)
    if num_frames * width * height > MAX_PIXELS:
        raise ImageError(f"it has {num_frames} frames of {width} x {height} pixels; at most {MAX_PIXELS:,} are taken")


def _frames_of_file(data: bytes, processor: VideoProcessor) -> Frames:
    """Decode the sampled frames of an animated file, whose size and number of frames are checked before."""
    from PIL import Image

    if len(data) > MAX_BYTES:
        raise ImageError(f"the file has {len(data) >> 20} MiB; at most {MAX_BYTES >> 20} are taken")
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as file:
            check_size(*file.size)
            count = getattr(file, "n_frames", 1)
            # Frames build on those before them, so all of them are decoded.
            if count > MAX_SOURCE_FRAMES:
                raise ImageError(f"it has {count} frames; at most {MAX_SOURCE_FRAMES:,} are taken")
            _check_pixels(count, *file.size)
            images: list[Image.Image] = []
            starts, now = [], 0.0
            rate = _rate_of(file)
            wanted = set(processor.sampled(count, rate))
            for index in range(count):
                file.seek(index)
                file.load()
                starts.append(now)
                now += float(file.info.get("duration") or DEFAULT_MS) / 1000
                if index in wanted:
                    images.append(to_rgb(file.copy()))
            return Frames(images, [starts[index] for index in sorted(wanted)], len(wanted) / count * rate)
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise ImageError(f"videos such as MP4 are not decoded here: {HINT}") from None
    except Image.DecompressionBombError:
        raise ImageError("its frames have too many pixels") from None
    except Exception as error:  # decoders raise errors of many types for files that are damaged
        raise ImageError(f"the file is damaged: {str(error)[:200] or type(error).__name__}") from None


def _rate_of(file: Image.Image) -> float:
    """Return the frames a second of an animated file. The first frame's time stands for all."""
    file.seek(0)
    file.load()  # of WebP only then is the time known
    milliseconds = float(file.info.get("duration") or DEFAULT_MS)
    return 1000 / max(milliseconds, 1.0)
