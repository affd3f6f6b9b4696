"""Checkpoints of safetensors files."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.checkpoints.base import DTYPES, Checkpoint, StoredTensor
from engine.models.checkpoints.threaded_reading import is_readable, read_tensors, tensor_ranges
from engine.models.errors import ModelError
from engine.models.files import WEIGHT_FILES, listing, read_json
from engine.models.matrix import CheckpointTensor
from engine.utils.folder_files import open_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

logger = logging.getLogger(__name__)


class SafetensorsFolder(Checkpoint):
    """The safetensors files of a model's folder: mapped, or read by threads onto a GPU."""

    def __init__(self, folder: Path) -> None:
        self.origin, self._folder = str(folder), folder
        self._file_of: dict[str, Path] = {}  # once `tensors` has been called

    def tensors(self) -> dict[str, StoredTensor]:
        stored: dict[str, StoredTensor] = {}
        outside: list[str] = []
        files, indexed = weight_files(self._folder)
        for file in files:
            with open_safetensors(file, self._folder) as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    if indexed and name not in indexed:
                        outside.append(name)
                        continue
                    if name in stored:
                        other = self._file_of[name].name
                        raise ModelError(f"{file}: tensor {name!r} is also in {other}; remove one file")
                    header = opened.get_slice(name)
                    stored[name] = StoredTensor(name, header.get_shape(), header.get_dtype(), str(file))
                    self._file_of[name] = file
        if outside:
            logger.info("%s: skips %d tensors that %s does not name", self.origin, len(outside), INDEX)
        return stored

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for file, own in self._by_file(names).items():
            with open_safetensors(file, self._folder) as opened:
                for name in own:
                    yield name, opened.get_tensor(name)

    def read_to(
        self, device: torch.device, wanted: Mapping[str, CheckpointTensor]
    ) -> Iterator[tuple[str, Tensor | None]]:
        for file, names in self._by_file(wanted).items():
            with _regular_file(file, self._folder) as opened:
                ranges = {name: each for name, each in tensor_ranges(opened).items() if name in names}
                into = {
                    name: wanted[name].memory
                    for name, each in ranges.items()
                    if not is_readable(each) and each.dtype in DTYPES and wanted[name].is_stored_so(DTYPES[each.dtype])
                }
                threaded = [each for name, each in ranges.items() if name in into or is_readable(each)]
                try:
                    for name, value in read_tensors(opened, threaded, device, into):
                        yield name, None if name in into else value
                except EOFError:
                    raise ModelError(f"{file}: truncated safetensors file; download it again") from None
            done = {each.name for each in threaded}
            yield from self.read(name for name in names if name not in done)

    def _by_file(self, names: Iterable[str]) -> dict[Path, list[str]]:
        by_file = defaultdict[Path, list[str]](list)
        for name in names:
            by_file[self._file_of[name]].append(name)
        return by_file


def weight_files(folder: Path) -> tuple[list[Path], Container[str]]:
    """Return the index's shards and the tensors that it names, or model.safetensors, or else all .safetensors files.

    Those of Mistral's own format do not count. A single file is newer than an index whose shards are absent.
    """
    single, index = folder / SINGLE, folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: 'weight_map' must map tensors to files; download it again")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelError(f"{index}: {name!r} is not a file name; download it again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if not missing:
            if single.is_file() and single not in files:
                logger.warning("%s: reads the shards that %s names, not %s", folder, INDEX, SINGLE)
            return files, weight_map
        if not single.is_file() or single in files:
            raise ModelError(f"{index}: names {', '.join(missing)}, which {folder} does not hold; download the rest")
        logger.warning("%s: reads %s, not the shards that %s names: %s is absent", folder, SINGLE, INDEX, missing[0])
    if single.is_file():
        return [single], ()
    files = sorted(
        file for file in folder.glob(WEIGHT_FILES) if file.is_file() and not file.name.startswith("consolidated")
    )
    if not files:
        raise ModelError(
            f"{folder}: holds no .safetensors weights (it holds {listing(folder)}); "
            "convert other weights with transformers' save_pretrained, or choose a model that has safetensors"
        )
    return files, ()


@contextmanager
def open_safetensors(file: Path, folder: Path) -> Iterator[Any]:
    """Open a safetensors file of a folder that is not trusted, memory-mapped.

    Raises `ModelError` if it lies elsewhere, is no regular file, or is invalid.
    """
    try:
        with (
            _regular_file(file, folder) as checked,
            safe_open(_path(checked, file), framework="pt", device="cpu") as opened,
        ):
            yield opened
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: corrupt or truncated safetensors file ({error}); download it again") from error


def _path(checked: BinaryIO, file: Path) -> str:
    """Return a path that opens the very file that was checked, whatever now lies where it was."""
    path = f"/dev/fd/{checked.fileno()}"
    return path if os.path.exists(path) else str(file)


@contextmanager
def _regular_file(file: Path, folder: Path) -> Iterator[BinaryIO]:
    """Open a regular file that lies in the folder or its cache. Raises `ModelError`."""
    try:
        opened = open_file(file, folder)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error})") from None
    with opened:
        yield opened
