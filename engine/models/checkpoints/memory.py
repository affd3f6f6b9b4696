"""A checkpoint in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from engine.models.checkpoints.base import DTYPES, Checkpoint, StoredTensor
from engine.models.errors import ModelError

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class NamedTensors(Checkpoint):
    """Tensors by name, on any device."""

    def __init__(self, tensors: Mapping[str, Tensor], origin: str = "memory") -> None:
        self.origin, self._tensors = origin, tensors

    def tensors(self) -> dict[str, StoredTensor]:
        if unknown := [name for name, tensor in self._tensors.items() if tensor.dtype not in NAMES]:
            dtype = self._tensors[unknown[0]].dtype
            raise ModelError(
                f"{self.origin}: {unknown[0]!r} has dtype {dtype}; give it one of {', '.join(map(str, NAMES))}"
            )
        return {
            name: StoredTensor(name, list(tensor.shape), NAMES[tensor.dtype], self.origin)
            for name, tensor in self._tensors.items()
        }

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, self._tensors[name]
