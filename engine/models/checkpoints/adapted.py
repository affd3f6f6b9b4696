"""Checkpoints that hold the adapters of several tasks beside their matrices (jina-embeddings-v3), merged when read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from engine.models.checkpoints.base import Checkpoint, StoredTensor
from engine.models.errors import ModelError
from engine.models.spec import AdaptationSpec

ORIGINAL, FACTORS = ".parametrizations.{}.original", (".parametrizations.{}.0.lora_A", ".parametrizations.{}.0.lora_B")


class AdaptedCheckpoint(Checkpoint):
    """A matrix W with `lora_A` [tasks, r, in] and `lora_B` [tasks, out, r] is W + scale · B A of the chosen task.

    For embeddings the factors are [tasks, rows, r] and [tasks, r, columns], and the product is A B.
    """

    def __init__(self, base: Checkpoint, spec: AdaptationSpec) -> None:
        self.origin, self._base, self._spec = base.origin, base, spec
        self._original: dict[str, str] = {}  # name → name in `base`, once `tensors` has been called
        self._factors: dict[str, tuple[str, str]] = {}

    def tensors(self) -> dict[str, StoredTensor]:
        stored = self._base.tensors()
        found: dict[str, StoredTensor] = {}
        for name, tensor in stored.items():
            module, mark, part = name.partition(".parametrizations.")
            what, _, kind = part.partition(".")
            if mark and kind != "original":
                continue
            own = f"{module}.{what}" if mark else name
            self._original[own] = name
            found[own] = replace(tensor, name=own)
            if mark:
                names = tuple(f"{module}{factor.format(what)}" for factor in FACTORS)
                self._factors[own] = self._checked(stored, tensor, names[0], names[1])
        return found

    def _checked(self, stored: dict[str, StoredTensor], tensor: StoredTensor, a: str, b: str) -> tuple[str, str]:
        """Return the names of the factors. Raises `ModelError` if they do not fit their matrix."""
        if a not in stored or b not in stored:
            raise ModelError(f"{tensor.source}: {tensor.name!r} lacks {a!r} or {b!r}")
        (first, second), count = (stored[name].shape for name in (a, b)), self._spec.count
        rows, columns = tensor.shape[0], tensor.shape[-1]
        rank = first[1] if len(first) == 3 and first[2] == columns else first[-1]
        linear, table = ([count, rank, columns], [count, rows, rank]), ([count, rows, rank], [count, rank, columns])
        if (first, second) not in (linear, table):
            raise ModelError(
                f"{tensor.source}: {a!r} and {b!r} of shapes {first} and {second} do not fit {tensor.shape}"
            )
        return a, b

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        chosen = self._spec.chosen
        for name in names:
            if chosen is None or name not in self._factors:
                [(_, value)] = self._base.read([self._original[name]])
                yield name, value
                continue
            wanted = (self._original[name], *self._factors[name])
            value, a, b = ({key: each.clone() for key, each in self._base.read(wanted)}[key] for key in wanted)
            first, second = a[chosen].float(), b[chosen].float()
            change = second @ first if first.shape[1] == value.shape[1] else first @ second
            yield name, (value.float() + self._spec.scale * change).to(value.dtype)
