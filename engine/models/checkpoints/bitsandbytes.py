"""Checkpoints of bitsandbytes: matrices of four bits (nf4, fp4) or eight are decoded when they are read.

`NAME.weight` [N · K / 2, 1] uint8 holds two codes a byte, the first in the high bits; `NAME.weight.absmax` the scale of
each block of codes, itself quantised if there is a `nested_absmax`. Of eight bits: `NAME.weight` [N, K] int8 with a
scale for each row, `NAME.SCB` [N].
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.checkpoints.base import DTYPES, StoredTensor
from engine.models.checkpoints.safetensors import SafetensorsFolder
from engine.models.errors import ModelError

STATE, ROWS = ".quant_state.bitsandbytes__", ".SCB"  # after a matrix's name: the settings of four bits, scales of eight
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")  # after the name of a matrix of four bits
NEEDLESS = (".weight_format",)
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class BitsAndBytesFolder(SafetensorsFolder):
    """The safetensors files of a model's folder, with decoded matrices."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._states: dict[str, dict[str, Any]] = {}  # matrix → settings
        self._with_rows: set[str] = set()  # matrices of eight bits

    def tensors(self) -> dict[str, StoredTensor]:
        stored = super().tensors()
        settings = {name: name.partition(STATE)[0] for name in stored if STATE in name}
        for name, value in super().read(settings):
            self._states[settings[name]] = self._state(name, value)
        self._with_rows = {name.removesuffix(ROWS) + ".weight" for name in stored if name.endswith(ROWS)}
        found = {}
        for name, tensor in stored.items():
            if STATE in name or name.endswith((*PARTS, *NEEDLESS, ROWS)):
                continue
            if (state := self._states.get(name)) is not None:
                dtype = NAMES[getattr(torch, state["dtype"])]
                tensor = StoredTensor(name, state["shape"], dtype, tensor.source)
            elif name in self._with_rows:
                tensor = StoredTensor(name, tensor.shape, "F32", tensor.source)
            found[name] = tensor
        return found

    def _state(self, name: str, value: Tensor) -> dict[str, Any]:
        """Return the settings of a matrix, which are JSON. Raises `ModelError` if they are malformed."""
        try:
            state = json.loads(bytes(value.flatten().tolist()))
            state["shape"] = [int(size) for size in state["shape"]]
            state["blocksize"] = int(state["blocksize"])
            if getattr(torch, str(state["dtype"])) in NAMES and state["blocksize"] > 0:
                return dict(state)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        raise ModelError(f"{self.origin}: {name!r} is malformed; download it again")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            state = self._states.get(name)
            if state is None and name not in self._with_rows:
                yield from super().read([name])
                continue
            parts = (name, *(name + part for part in PARTS)) if state else (name, name.removesuffix(".weight") + ROWS)
            values = dict(super().read(part for part in parts if part in self._file_of))
            try:
                yield name, _of_rows(*values.values()) if state is None else _decoded(name, values, state)
            except (RuntimeError, IndexError, KeyError) as error:
                raise ModelError(f"{self.origin}: {name!r} cannot be decoded ({error}); download it again") from None

    def read_to(self, device: torch.device, wanted: Any) -> Iterator[tuple[str, Tensor | None]]:
        for name, value in self.read(wanted):
            yield name, value.to(device)


def _decoded(name: str, values: dict[str, Tensor], state: dict[str, Any]) -> Tensor:
    """Return a matrix of four bits in its original shape and dtype."""
    scale = values[name + ".absmax"]
    if (outer := values.get(name + ".nested_absmax")) is not None:
        inner = values[name + ".nested_quant_map"][scale.int()]
        scale = _by_blocks(inner, outer, int(state["nested_blocksize"])) + float(state["nested_offset"])
    packed = values[name].flatten()
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[: math.prod(state["shape"])]
    floats = _by_blocks(values[name + ".quant_map"][codes.int()], scale.float(), state["blocksize"])
    return floats.view(state["shape"]).to(getattr(torch, state["dtype"]))


def _by_blocks(values: Tensor, scales: Tensor, size: int) -> Tensor:
    """Multiply each block of `size` values [n] by its scale."""
    return values * scales.repeat_interleave(size)[: len(values)]


def _of_rows(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * (scales.float() / 127)[:, None]
