"""Checkpoints of GGUF files."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.checkpoints.base import DTYPES, Checkpoint, StoredTensor
from engine.models.errors import ModelError
from engine.models.gguf.blocks import TYPES
from engine.models.gguf.folder import TENSORS
from engine.models.matrix import CheckpointTensor

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF file, mapped, with the names and the layout of a Hugging Face checkpoint.

    `NAME.blocks` [rows, blocks, bytes] uint8 are a matrix's blocks as they are; all other tensors are decoded. Experts,
    stacked in the file, are tensors of their own.
    """

    def __init__(self, folder: Path, keeps: Collection[str] = ()) -> None:
        """folder: made by `gguf.folder.model_folder`. keeps: types of blocks that kernels read; others are decoded."""
        read = json.loads((folder / TENSORS).read_text("utf-8"))
        self._files: list[tuple[str, int, int]] = [tuple(each) for each in read["files"]]
        self.origin = self._files[0][0]
        self._stacks: dict[str, dict[str, Any]] = {}
        for name, tensor in read["tensors"].items():
            is_kept = tensor["blocks"] and tensor["type"] in keeps
            if tensor["blocks"]:
                name += ".blocks" if is_kept else ".weight"
            self._stacks[name] = {**tensor, "blocks": is_kept}
        self._where: dict[str, tuple[str, int | None]] = {}  # name → name in `_stacks`, index in a stack
        for name, tensor in self._stacks.items():
            if "{}" in name:
                self._where |= {name.format(i): (name, i) for i in range(tensor["shape"][0])}
            else:
                self._where[name] = name, None
        self._mapped: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, StoredTensor]:
        for file, size, modified in self._files:
            try:
                found = os.stat(file)
            except OSError as error:
                raise ModelError(f"{file}: cannot be read ({error.strerror})") from None
            if (found.st_size, found.st_mtime_ns) != (size, modified):
                raise ModelError(f"{file}: has been changed since this start began; start again")
            self._mapped[file] = torch.from_file(file, size=size, dtype=torch.uint8)
        return {name: self._stored(name) for name in self._where}

    def _stored(self, name: str) -> StoredTensor:
        stack, index = self._where[name]
        tensor = self._stacks[stack]
        of, shape = TYPES[tensor["type"]], tensor["shape"][0 if index is None else 1 :]
        if tensor["blocks"]:
            return StoredTensor(name, [*shape[:-1], shape[-1] // of.values, of.num_bytes], "U8", tensor["file"])
        return StoredTensor(name, shape, NAMES[of.dtype], tensor["file"])

    def log_decoding(self, dtype: torch.dtype) -> None:
        """Log which types of matrices become floats of `dtype` in memory, and how much that takes."""
        decoded = [
            tensor
            for tensor in self._stacks.values()
            if not tensor["blocks"] and TYPES[tensor["type"]].unpack is not None
        ]
        if decoded:
            logger.info(
                "GGUF: matrices of the types %s become %s and take %.2f GiB, %.2f in the file",
                ", ".join(sorted({tensor["type"] for tensor in decoded})),
                str(dtype).removeprefix("torch."),
                sum(math.prod(tensor["shape"]) for tensor in decoded) * dtype.itemsize / 2**30,
                sum(tensor["num_bytes"] for tensor in decoded) / 2**30,
            )

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, self._value(name, CPU)

    def read_for(self, wanted: Mapping[str, CheckpointTensor]) -> Iterator[tuple[str, Tensor]]:
        for name, declared in wanted.items():
            yield name, self._value(name, CPU, declared.memory.dtype if declared.is_copied else torch.float32)

    def read_to(
        self, device: torch.device, wanted: Mapping[str, CheckpointTensor]
    ) -> Iterator[tuple[str, Tensor | None]]:
        for name in wanted:
            yield name, self._value(name, device)

    def _value(self, name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Read a tensor; `dtype`: of decoded blocks. Its entry may say: `heads` whose rows are permuted, an `offset`
        that was added, `log` where the file has -exp(value), and the bytes from one expert to the next, if they are not
        an expert's (`stride`).
        """
        stack, index = self._where[name]
        tensor = self._stacks[stack]
        of, shape = TYPES[tensor["type"]], tensor["shape"]
        start, size = tensor["start"], tensor["num_bytes"]
        if index is not None:
            size //= shape[0]
            start, shape = start + index * tensor.get("stride", size), shape[1:]
        data = self._mapped[tensor["file"]][start : start + size].to(device)
        rows = data.view(shape[0] if of.unpack is None or len(shape) > 1 else 1, -1)
        if heads := tensor.get("heads"):  # channels 2i and 2i + 1 of a head become i and i + D / 2
            rows = rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
        if tensor["blocks"]:
            return rows.view(shape[0], -1, of.num_bytes)
        value = of.decode(rows, torch.float32 if tensor.keys() & {"log", "offset"} else dtype).view(shape)
        if tensor.get("log"):
            return (-value).log()
        return value - tensor["offset"] if "offset" in tensor else value
