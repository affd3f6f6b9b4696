"""A model's checkpoint with other values for some of its tensors, from folders of safetensors files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.models.checkpoints.base import Checkpoint, StoredTensor
from engine.models.checkpoints.safetensors import SafetensorsFolder
from engine.models.errors import ModelError
from engine.models.matrix import CheckpointTensor


class OverlaidCheckpoint(Checkpoint):
    """Each tensor is that of the last folder that has it, else the model's."""

    def __init__(self, base: SafetensorsFolder, overlays: Sequence[Path]) -> None:
        self.origin, self._base = base.origin, base
        self._overlays = [SafetensorsFolder(folder) for folder in overlays]
        self._reader_of: dict[str, SafetensorsFolder] = {}  # once `tensors` has been called

    def tensors(self) -> dict[str, StoredTensor]:
        stored = self._base.tensors()
        self._reader_of = dict.fromkeys(stored, self._base)
        for overlay in self._overlays:
            for name, tensor in overlay.tensors().items():
                if name not in stored:
                    raise ModelError(f"{tensor.source}: the model has no tensor {name!r}")
                if tensor.shape != stored[name].shape:
                    raise ModelError(
                        f"{tensor.source}: tensor {name!r} must have the shape {stored[name].shape}, got {tensor.shape}"
                    )
                stored[name], self._reader_of[name] = tensor, overlay
        return stored

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for reader, own in self._by_reader(names).items():
            yield from reader.read(own)

    def read_to(
        self, device: torch.device, wanted: Mapping[str, CheckpointTensor]
    ) -> Iterator[tuple[str, Tensor | None]]:
        for reader, own in self._by_reader(wanted).items():
            yield from reader.read_to(device, {name: wanted[name] for name in own})

    def _by_reader(self, names: Iterable[str]) -> dict[SafetensorsFolder, list[str]]:
        by_reader = defaultdict[SafetensorsFolder, list[str]](list)
        for name in names:
            by_reader[self._reader_of[name]].append(name)
        return by_reader
