"""LoRA adapters of a decoder's experts: where they lie in a slot, and how PEFT's tensors fill it.

PEFT and trainers for MoEs have three layouts: modules for each expert; stacked parameters (`target_parameters`), whose
A [E · r, in] has the experts one after the other and B [out, r · E] alternately, gate and up in one; and tensors
[E, r, in], [E, out, r] of a projection of all experts, where [1, …] is shared by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from engine.models.errors import ModelError
from engine.models.moe import MoE

UNIT = 64  # values: addresses of matrices in a slot, and of slots, are multiples
PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


class ExpertTarget(NamedTuple):
    """The matrices that a module's A and B change."""

    layer: int  # index in `ExpertAdapters.layers`
    expert: int | None  # None: all of them
    projection: str  # "gate", "up", "down", or "" for stacked parameters: the shapes say which
    is_nested: bool = False  # of stacked parameters, should the shapes not say it: gate and up


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """An MoE, and where its experts' adapters lie in a slot: expert after expert."""

    moe: MoE
    rank: int  # R
    is_own: bool  # otherwise another pipeline stage has it
    start: int  # of the first expert, in the slot's values

    @property
    def hidden(self) -> int:
        return len(self.moe.gate_up.columns)

    @property
    def inner(self) -> int:
        return self.moe.spec.intermediate_size

    @property
    def halves(self) -> tuple[str, ...]:
        return ("up",) if self.moe.spec.activation == "relu2" else ("gate", "up")

    @property
    def count(self) -> int:
        """Experts of this rank."""
        return self.moe.gate_up.num_stacked

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of an expert's matrices, in order: A of gate and up, B of both, A of down, B of down."""
        num, rank = len(self.halves), self.rank
        return [(num * rank, self.hidden), (num * self.inner, rank), (rank, self.inner), (self.hidden, rank)]

    @property
    def offsets(self) -> list[int]:
        """Offsets of these matrices in an expert's values, and their end."""
        found = [0]
        for rows, columns in self.shapes:
            found.append(-(-(found[-1] + rows * columns) // UNIT) * UNIT)
        return found

    @property
    def stop(self) -> int:
        return self.start + self.count * self.offsets[-1]

    @property
    def groups(self) -> tuple[kernels.RowGroup, ...]:
        """Rows of gate and up, which have an A each."""
        return tuple(
            kernels.RowGroup(number * self.inner, (number + 1) * self.inner, number)
            for number in range(len(self.halves))
        )

    def matrix(self, which: int, expert: int, values: Tensor) -> Tensor:
        """Return a view of one of `shapes` in a slot's values [V]. `expert`: counted from this rank's first."""
        rows, columns = self.shapes[which]
        first = self.start + expert * self.offsets[-1] + self.offsets[which]
        return values[first : first + rows * columns].view(rows, columns)

    def attach(self, values: Tensor) -> None:
        """Let the MoE read adapters from slots: values [S, V]."""
        steps = values.shape[1] // UNIT, self.offsets[-1] // UNIT
        device, num_slots = values.device, len(values)
        slots, experts = (torch.arange(count, dtype=torch.int32, device=device) for count in (num_slots, self.count))
        numbers = (slots[:, None] * steps[0] + experts * steps[1]).flatten()
        last = (num_slots - 1) * steps[0] + (self.count - 1) * steps[1]
        views = [
            values.as_strided((last + 1, *shape), (UNIT, shape[1], 1), self.start + offset)
            for shape, offset in zip(self.shapes, self.offsets, strict=False)
        ]
        groups = self.groups, (kernels.RowGroup(0, self.hidden, 0),)
        found: list[kernels.LoraWeights] = []
        for down, up, own in zip(views[::2], views[1::2], groups, strict=True):
            factor, shift = (each(1, up.shape[1], device=device) for each in (torch.ones, torch.zeros))
            factor, shift = factor.expand(last + 1, -1), shift.expand(last + 1, -1)
            found.append(kernels.LoraWeights(down, up, factor, shift, own, *kernels.LoraWeights.blocks_of(own, device)))
        self.moe.adapters = kernels.ExpertLora(found[0], found[1], numbers)


class ExpertAdapters:
    """The MoEs of a decoder that may have adapters of experts."""

    def __init__(self, rank: int) -> None:
        """`rank`: R, the most that an adapter's rank may be, padded."""
        self.rank = rank
        self.layers: list[ExpertLayout] = []
        self._targets: dict[str, ExpertTarget] = {}  # of modules, by their names in the checkpoint

    def add(self, moe: MoE, is_own: bool, start: int) -> int:
        """Add an MoE whose adapters begin at `start` in a slot's values. Returns where they end."""
        index, names = len(self.layers), moe.spec.names
        self.layers.append(ExpertLayout(moe, self.rank, is_own, start))
        first = moe.gate_up.parts[0].name  # of expert 0
        if names.stacked is None:
            template = names.up if moe.spec.activation == "relu2" else names.gate
            prefix = first.removesuffix(template.format(0)) + template.split(".{}")[0]
            own = {"gate": names.gate, "up": names.up, "down": names.down}
            known = {template.rsplit(".", 1)[1]: projection for projection, template in own.items()}
        else:
            prefix, known = first.rsplit(".", 1)[0], {}
        self._targets[prefix] = ExpertTarget(index, None, "")
        for name, projection in (PROJECTIONS | known).items():
            self._targets[f"{prefix}.{name}"] = ExpertTarget(index, None, projection)
            for expert in range(moe.spec.num_experts):
                self._targets[f"{prefix}.{expert}.{name}"] = ExpertTarget(index, expert, projection)
        return self.layers[-1].stop if is_own else start

    def attach(self, values: Tensor) -> None:
        for layer in self.layers:
            if layer.is_own:
                weight = layer.moe.gate_up.weight
                if isinstance(weight, kernels.CompressedWeight) or getattr(weight, "panel", False):
                    raise ModelError(
                        "lora_experts needs experts whose weights are not packed for quantised activations"
                    )
                layer.attach(values)

    def find(self, module: str) -> ExpertTarget | None:
        """Return the target of a module, by its name in the checkpoint; PEFT nests wrappers of several parameters."""
        found = self._targets.get(module.removesuffix(".base_layer"))
        return found and found._replace(is_nested=module.endswith(".base_layer"))

    def problem(self, target: ExpertTarget, kind: str, shape: list[int], rank: int) -> str:
        """Say what is wrong with a tensor; "": nothing. `rank`: r of the module."""
        layer = self.layers[target.layer]
        if kind not in ("lora_A", "lora_B"):
            return "which experts cannot have"
        wanted = [want for want, _ in self._forms(layer, target, kind, rank)]
        if shape in wanted:
            return ""
        return f"which has shape {shape}, it must be " + " or ".join(map(str, wanted))

    def _forms(
        self, layer: ExpertLayout, target: ExpertTarget, kind: str, rank: int
    ) -> Iterator[tuple[list[int], Callable[[Tensor, int], tuple[str, Tensor]]]]:
        """Yield shapes that a tensor may have, and functions of it and an expert: the projection, and its matrix."""
        count, inner, hidden = layer.moe.spec.num_experts, layer.inner, layer.hidden
        if target.projection:
            sizes = (inner, hidden) if target.projection == "down" else (hidden, inner)
            shape = [rank, sizes[0]] if kind == "lora_A" else [sizes[1], rank]
            yield shape, lambda value, expert: (target.projection, value)
            if target.expert is None:
                yield [count, *shape], lambda value, expert: (target.projection, value[expert])
                yield [1, *shape], lambda value, expert: (target.projection, value[0])
            return
        inputs = {"gate_up": hidden, "down": inner}
        outputs = {"gate_up": len(layer.halves) * inner, "down": hidden}
        for projection in ("gate_up", "down") if target.is_nested else ("down", "gate_up"):
            if kind == "lora_A":
                yield [count * rank, inputs[projection]], partial(_stacked_down, projection, count)
            else:
                yield [outputs[projection], rank * count], partial(_stacked_up, projection, count)

    def fill(self, target: ExpertTarget, kind: str, value: Tensor, rank: int, scale: float, values: Tensor) -> None:
        """Write this rank's part of a tensor to a slot's values [V]."""
        layer = self.layers[target.layer]
        if not layer.is_own:
            return
        matrix_of = next(take for shape, take in self._forms(layer, target, kind, rank) if shape == list(value.shape))
        first, inner = layer.moe.first, layer.inner
        for expert in range(layer.count):
            if target.expert not in (None, first + expert):
                continue
            projection, matrix = matrix_of(value, first + expert)
            halves = range(len(layer.halves))
            if projection in layer.halves:
                halves = range(layer.halves.index(projection), layer.halves.index(projection) + 1)
            if kind == "lora_A":
                into = layer.matrix(2 if projection == "down" else 0, expert, values)
                for half in (0,) if projection == "down" else halves:
                    into[half * self.rank : half * self.rank + rank] = matrix
                continue
            into = layer.matrix(3 if projection == "down" else 1, expert, values)
            matrix = (matrix.float() * scale).to(values.dtype)
            if projection == "down":
                into[:, :rank] = matrix
            elif projection != "gate_up":
                into[halves[0] * inner : (halves[0] + 1) * inner, :rank] = matrix
            elif layer.moe.spec.names.interleaved:
                into[:inner, :rank], into[inner:, :rank] = matrix[::2], matrix[1::2]
            else:
                into[:, :rank] = matrix


def _stacked_down(projection: str, count: int, value: Tensor, expert: int) -> tuple[str, Tensor]:
    return projection, value.unflatten(0, (count, -1))[expert]


def _stacked_up(projection: str, count: int, value: Tensor, expert: int) -> tuple[str, Tensor]:
    return projection, value.unflatten(1, (-1, count))[:, :, expert]
