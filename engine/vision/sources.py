"""The files of images: in data URLs, in folders that the server may show, and on web servers that it may ask."""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from engine.utils.folder_files import read_file
from engine.vision import decode
from engine.vision.decode import ImageError
from engine.vision.download import download

_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
# Pictures, one a frame, with a comma between; perhaps with the number of them a second.
_FRAMES_URL = re.compile(r"data:video/(?:jpeg|png|webp)(?:;fps=([0-9.]{1,10}))?;base64,", re.IGNORECASE)
_SPACES = re.compile(r"\s+")
_PART_CHARS = 1 << 18  # of base64, decoded at a time: meanwhile no other thread runs Python


@dataclass(frozen=True, slots=True)
class ImageSource:
    """The place of an image or of a video: a URL, or a file in base64."""

    url: str = ""  # data:, http:, https: or file:
    base64: str = ""
    is_video: bool = False

    @property
    def is_remote(self) -> bool:
        """Return whether it must be downloaded."""
        return self.url[:8].lower().startswith(("http://", "https://"))


@dataclass(frozen=True)
class Media:
    """Files that requests may make this process read."""

    domains: tuple[str, ...] = ()  # host names of web servers, lower case; empty: none
    folder: Path | None = None  # files below it; None: none

    def read(self, source: ImageSource) -> bytes:
        """Return the bytes of an image's file; may take seconds for a remote one. Raises `ImageError`."""
        if source.base64:
            return from_base64(source.base64)
        if found := _DATA_URL.match(source.url):
            return from_base64(source.url[found.end() :])
        if source.is_remote:
            if not self.domains:
                raise ImageError("http URLs are not allowed here (--allowed-media-domains): send a data URL")
            return download(source.url, self.domains)
        if source.url[:7].lower() == "file://":
            return self._local(source.url)
        raise ImageError("it must be a data URL with base64, such as data:image/png;base64,…")

    def read_frames(self, source: ImageSource, most: int) -> tuple[list[bytes], float | None]:
        """Return the files of a video, a single one or up to `most` pictures, and how many of these a second has (None:
        it is not said). Raises `ImageError`.
        """
        found = _FRAMES_URL.match(source.url)
        if found is None:
            return [self.read(source)], None
        files = source.url[found.end() :].split(",", most)
        if len(files) > most:
            raise ImageError(f"it has more than {most} frames")
        return [from_base64(each) for each in files], _rate(found[1]) if found[1] else None

    def _local(self, url: str) -> bytes:
        if self.folder is None:
            raise ImageError("file URLs are not allowed here (--allowed-local-media-path): send a data URL")
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ImageError("a file URL must name a file of this machine: file:///path")
        try:
            return read_file(Path(unquote(parts.path)), self.folder, decode.MAX_BYTES)
        except (OSError, ValueError):  # the reason is not shown: it would say which files exist
            raise ImageError("there is no such file in the folder of --allowed-local-media-path") from None


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1000:
        raise ImageError(f"fps must be a number of frames a second, got {text}")
    return rate


def from_base64(text: str) -> bytes:
    """Decode a file in base64. Raises `ImageError`."""
    if len(text) > decode.MAX_BYTES * 4 // 3 + 4096:
        raise ImageError(f"the file has more than {decode.MAX_BYTES >> 20} MiB")
    try:
        return _decoded(_SPACES.sub("", text) if len(text.split(None, 1)) > 1 else text)
    except (binascii.Error, ValueError):
        raise ImageError("its base64 is not valid") from None


def _decoded(text: str) -> bytes:
    parts = []
    for start in range(0, len(text), _PART_CHARS):
        parts.append(binascii.a2b_base64(text[start : start + _PART_CHARS], strict_mode=True))
        if len(parts[-1]) < _PART_CHARS // 4 * 3 and start + _PART_CHARS < len(text):
            raise binascii.Error("padding before the end")
    return b"".join(parts)
