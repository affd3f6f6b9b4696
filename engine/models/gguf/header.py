"""Reads the header of a GGUF file: metadata, and the place of each tensor. The file is not trusted.

Layout, little-endian: "GGUF", version, number of tensors, number of key-value pairs, the pairs, the tensors' names,
dimensions, types and offsets, then aligned data.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.models.errors import ModelError
from engine.models.gguf.types import SIZES, type_name

MAX_HEADER_BYTES = 1 << 30  # the largest published is some 20 MB
MAX_PAIRS, MAX_TENSORS, MAX_ITEMS = 1 << 16, 1 << 20, 1 << 23  # items: of all arrays
MAX_NAME_BYTES, MAX_DIMENSIONS = 1 << 12, 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type → struct
STRING, ARRAY = 8, 9
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_SPLITS = 1000


class StoredBlocks(NamedTuple):
    """A tensor of a GGUF file."""

    shape: tuple[int, ...]  # the last dimension is contiguous
    type: str  # a name in `SIZES`
    file: str
    start: int  # byte offset in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a GGUF file, or of all files of a split one."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredBlocks]


def split_files(path: Path) -> list[Path]:
    """Return all files of a model that is split into NAME-0000i-of-0000n.gguf, or the file alone if it is not.

    Raises `ModelError`, which names the missing files.
    """
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    if not 1 <= count <= MAX_SPLITS:
        raise ModelError(f"{path}: a split into {count} files is not supported; supported: 1 to {MAX_SPLITS}")
    files = [path.with_name(f"{stem}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(f"{path}: the model is split; {', '.join(missing[:3])}{more} are missing beside it")
    return files


def read_header(files: list[Path]) -> Header:
    """Read the headers of a model's files; metadata are the first one's. Raises `ModelError`."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, StoredBlocks] = {}
    for file in files:
        header = _read(file)
        metadata = metadata or header.metadata
        if twice := header.tensors.keys() & tensors.keys():
            raise ModelError(f"{file}: tensor {min(twice)!r} is in two files; download them again")
        tensors |= header.tensors
    total = metadata.get("split.tensors.count")
    if len(files) > 1 and total is not None and total != len(tensors):
        raise ModelError(f"{files[0]}: its files hold {len(tensors)} of {total} tensors; download them again")
    return Header(metadata, tensors)


def _read(path: Path) -> Header:
    try:
        if not path.stat().st_size:
            raise _no_gguf(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None


def _no_gguf(path: Path) -> ModelError:
    return ModelError(f"{path}: is not a GGUF file; give one, or the folder of a model in safetensors")


class _Reader:
    """A position in the bytes of a file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        self.end = min(len(data), MAX_HEADER_BYTES)
        self.num_items = 0

    def header(self) -> Header:
        if self.data[:4] != b"GGUF":
            raise _no_gguf(self.path)
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            kind = "big-endian files" if version & 0xFFFF == 0 else f"version {version}"
            raise ModelError(f"{self.path}: GGUF {kind} are not supported; supported: versions 2 and 3, little-endian")
        num_tensors, num_pairs = self.number("Q"), self.number("Q")
        if num_tensors > MAX_TENSORS or num_pairs > MAX_PAIRS:
            raise self.damaged(f"it declares {num_tensors} tensors and {num_pairs} settings")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            name = self.text(MAX_NAME_BYTES)
            if name in metadata:
                raise self.damaged(f"{name!r} is there twice")
            metadata[name] = self.value(name)
        return Header(metadata, self.tensors(num_tensors, metadata.get("general.alignment", 32)))

    def tensors(self, count: int, alignment: Any) -> dict[str, StoredBlocks]:
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment % 8:
            raise self.damaged(f"general.alignment is {alignment!r}")
        declared = [self.tensor() for _ in range(count)]
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, StoredBlocks] = {}
        for name, shape, kind, offset in declared:
            of = SIZES[kind]
            num_bytes = math.prod(shape) // of.values * of.num_bytes
            if offset % alignment or start + offset + num_bytes > len(self.data):
                raise self.damaged(f"{name!r} lies outside of the file, or not aligned")
            if name in tensors:
                raise self.damaged(f"{name!r} is there twice")
            tensors[name] = StoredBlocks(shape, kind, str(self.path), start + offset, num_bytes)
        return tensors

    def tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        """Return name, shape, type and offset of the next tensor."""
        name, num_dimensions = self.text(MAX_NAME_BYTES), self.number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.damaged(f"{name!r} has {num_dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(num_dimensions))[::-1]
        kind = type_name(self.number("I"))
        if kind not in SIZES:
            raise ModelError(f"{self.path}: {name!r} is stored as {kind}, which is not supported; {supported()}")
        if 0 in shape or math.prod(shape) >= 1 << 48 or shape[-1] % SIZES[kind].values:
            raise self.damaged(f"{name!r} has shape {list(shape)} of type {kind}")
        return name, shape, kind, self.number("Q")

    def value(self, name: str) -> Any:
        kind = self.number("I")
        if kind == STRING:
            return self.text(MAX_HEADER_BYTES)
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise self.damaged(f"{name!r} has the unknown type {kind}")
        of, count = self.number("I"), self.number("Q")
        self.num_items += count
        if self.num_items > MAX_ITEMS:
            raise self.damaged(f"{name!r} makes {self.num_items} items of arrays")
        if of == STRING:
            return [self.text(MAX_HEADER_BYTES) for _ in range(count)]
        if of not in SCALARS:
            raise self.damaged(f"{name!r} is an array of the unknown type {of}")
        data = self.bytes(count * struct.calcsize(SCALARS[of]))
        return list(struct.unpack(f"<{count}{SCALARS[of]}", data))

    def number(self, form: str) -> Any:
        form = "<" + form
        return struct.unpack(form, self.bytes(struct.calcsize(form)))[0]

    def text(self, max_bytes: int) -> str:
        size = self.number("Q")
        if size > max_bytes:
            raise self.damaged(f"a text of {size} bytes")
        try:
            return self.bytes(size).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged("a text is not UTF-8") from None

    def bytes(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise self.damaged("it ends within its header")
        self.at += count
        return self.data[self.at - count : self.at]

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: damaged GGUF file: {what}; download it again")


def supported() -> str:
    return f"supported: {', '.join(SIZES)}"
