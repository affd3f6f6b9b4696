"""A checkpoint as the loader reads it: named tensors with shapes, dtypes and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.matrix import CheckpointTensor

# By safetensors' names, which all readers use.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, without its values."""

    name: str
    shape: list[int]
    dtype: str  # safetensors' name
    source: str  # the file that holds it, for errors

    @property
    def num_bytes(self) -> int:
        itemsize = DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 1
        return itemsize * torch.Size(self.shape).numel()


class Checkpoint(ABC):
    """A reader of stored tensors."""

    origin: str  # the model's folder, for errors

    @abstractmethod
    def tensors(self) -> dict[str, StoredTensor]:
        """Return all tensors by name. Raises `ModelError` for missing or damaged files, or a tensor stored twice."""

    @abstractmethod
    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each name and its value, in any order: on the CPU, so that reading a slice costs only the slice.

        A value is valid until the next one is asked for. Raises `ModelError` if the checkpoint is damaged.
        """

    def read_for(self, wanted: Mapping[str, CheckpointTensor]) -> Iterator[tuple[str, Tensor]]:
        """Like `read`, for a rank that copies its slices. A value may be rounded to the dtype of the declared memory.

        wanted: name → declared tensor.
        """
        yield from self.read(wanted)

    def read_to(
        self, device: torch.device, wanted: Mapping[str, CheckpointTensor]
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Yield each name and its value, for a rank that wants whole tensors on `device`: values may be there already.

        wanted: name → declared tensor. The value is None if it has been written to the declared memory.
        """
        yield from self.read(wanted)


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Random weights instead of a checkpoint, for benchmarks."""

    origin: str  # the model's folder, for errors
    seed: int = 0
