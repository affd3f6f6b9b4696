"""LoRA adapters of one linear layer, and which token of a step uses which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.data.forms import FORMS

BLOCK_ROWS, WIDE_ROWS = 64, 256  # rows of a layer's result that a program computes: in large steps, in others
SMALL_TILE, LARGE_TILE = 16, 64  # tokens that a program computes
LARGE_STEP = 1024  # tokens from which tiles are large
UNUSED = -2  # slot of an unused tile
COUNTERS = 256  # kernels whose counters are zeroed together: of most models, all of a step


class RowGroup(NamedTuple):
    """Rows [start, stop) of a layer's result that share one A."""

    start: int
    stop: int
    number: int  # of their A


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """The adapters of a linear layer in S slots: y → factor · y + up · (down · x) + shift.

    In an empty slot, and where an adapter leaves a layer as it is, `down`, `up` and `shift` are 0, `factor` is 1.
    Stacked projections have an A each: the rows of group g use R rows of `down` from g · R on.
    """

    down: Tensor  # [S, G · R, in]: A; the slot's stride is free
    up: Tensor  # [S, out, R]: B, scaled; the slot's stride is free
    factor: Tensor  # [S, out] float32: 1, except with DoRA; the slot's stride is free
    shift: Tensor  # [S, out] float32, with the strides of `factor`
    groups: tuple[RowGroup, ...]  # all rows, in order
    blocks: Tensor  # [N, 3] int32: first row, end and group of at most `BLOCK_ROWS` rows
    wide_blocks: Tensor  # the same of `WIDE_ROWS`
    extended: Tensor | None = None  # [out + S · G · R, in]: the layer's weight and `down` of all slots, for one GEMM

    @property
    def rank(self) -> int:
        """R: the most that an adapter's rank may be, padded."""
        return self.up.shape[2]

    @staticmethod
    def blocks_of(groups: Sequence[RowGroup], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `blocks` and `wide_blocks` of these groups."""
        narrow, wide = (
            [
                (first, min(first + rows, stop), number)
                for start, stop, number in groups
                for first in range(start, stop, rows)
            ]
            for rows in (BLOCK_ROWS, WIDE_ROWS)
        )
        return (
            torch.tensor(narrow, dtype=torch.int32, device=device),
            torch.tensor(wide, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingLora:
    """The adapters of an embedding in S slots, of a rank's V tokens from `first` on. Strides of slots are free.

    A token's embedding is its retrained row if it has one, else the base's; and + up · down[token].
    """

    down: Tensor  # [S, V, R]: A, transposed
    up: Tensor  # [S, hidden, R]: B, scaled
    rows: Tensor  # [S, N, hidden]: retrained
    indices: Tensor  # [S, V] int32: 1 + the token's index in `rows`; 0: it is not retrained
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class RetrainedRows:
    """Rows of an output head that the adapters in S slots have retrained. Strides of slots are free."""

    rows: Tensor  # [S, N, hidden]
    ids: Tensor  # [S, N] int32: 1 + the row's index among this rank's logits; 0: unused


class Tiles(NamedTuple):
    """Tokens sorted by slot, and tiles of them that have one slot each."""

    order: Tensor  # [T] int32: tokens sorted by slot, those without an adapter last
    tiles: Tensor  # [N, 3] int32: slot, first and end in `order`; slot -1: no adapter; -2: an unused tile
    size: int  # most tokens of a tile


class AdapterTokens:
    """The slots of a step's T tokens. What kernels need of them is computed once, when the first layer asks for it."""

    def __init__(self, slots: Tensor, num_slots: int, numbers: Tensor | None = None) -> None:
        """slots [T] int32: of each token, below `num_slots`; -1: no adapter. numbers [num_slots] int32: of each slot's
        matrices in `LoraWeights`; None: the slot itself.
        """
        self.slots, self.num_slots, self.numbers = slots, num_slots, numbers
        self._counters: Tensor | None = None

    def __getitem__(self, tokens: slice | Tensor) -> AdapterTokens:
        """Return the slots of some of the tokens."""
        return AdapterTokens(self.slots[tokens], self.num_slots, self.numbers)

    def counters(self, count: int = 1) -> Tensor:
        """Return counters [count] int32 for the next kernel alone, in which its programs count. The device sets them to
        0 before, also when a CUDA graph is replayed.
        """
        if self._counters is None or len(self._counters) < count:
            self._counters = torch.zeros(COUNTERS * count, dtype=torch.int32, device=self.slots.device)
        found, self._counters = self._counters[:count], self._counters[count:]
        return found

    @cached_property
    def by_slot(self) -> list[tuple[int, Tensor | None]]:
        """The slots in use (their numbers), with the indices of their tokens; None: all tokens. Waits for the
        device.
        """
        used = [slot for slot in self.slots.unique().tolist() if slot >= 0]
        found = [(slot, (self.slots == slot).nonzero().flatten()) for slot in used]
        numbers = used if self.numbers is None else self.numbers[used].tolist()
        return [
            (number, None if len(at) == len(self.slots) else at) for number, (_, at) in zip(numbers, found, strict=True)
        ]

    @cached_property
    def tiles(self) -> Tiles:
        """Computed without waiting for the device, in shapes that depend on T alone: a CUDA graph can do so."""
        slots, num_slots, count, device = self.slots, self.num_slots, len(self.slots), self.slots.device
        size = LARGE_TILE if count >= LARGE_STEP and not FORMS.deterministic else SMALL_TILE
        keys = torch.where(slots < 0, num_slots, slots).long()
        order = torch.argsort(keys, stable=True)
        counts = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        counts = counts.scatter_add_(0, keys, torch.ones_like(keys))
        token_ends, num_tiles = counts.cumsum(0), (counts + size - 1) // size
        tile_ends = num_tiles.cumsum(0)
        index = torch.arange(count // size + min(num_slots + 1, count), device=device)
        found = torch.searchsorted(tile_ends, index, right=True)
        kind = found.clamp(max=num_slots)
        first = token_ends[kind] - counts[kind] + (index - tile_ends[kind] + num_tiles[kind]) * size
        end = torch.minimum(first + size, token_ends[kind])
        slot = torch.where(found < num_slots, found, torch.where(found == num_slots, -1, UNUSED))
        used = slot > UNUSED
        if self.numbers is not None:
            slot = torch.where(slot >= 0, self.numbers[slot.clamp(min=0)], slot)
        tiles = torch.stack([slot, torch.where(used, first, 0), torch.where(used, end, 0)], 1)
        return Tiles(order.int(), tiles.int(), size)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLora:
    """The adapters of a rank's E experts in S slots. Each expert of each slot counts as a slot of its own."""

    gate_up: LoraWeights
    down: LoraWeights
    numbers: Tensor  # [S · E] int32: of expert e in slot s, at s · E + e, in both

    def routed(self, ids: Tensor, first: int, count: int, tokens: AdapterTokens) -> AdapterTokens:
        """Return the adapters of routed tokens [T · k]: ids [T, k] int32 of their experts. This rank has `count`
        experts from `first` on.
        """
        local, slots = ids - first, tokens.slots[:, None]
        is_own = (local >= 0) & (local < count) & (slots >= 0)
        found = torch.where(is_own, slots * count + local, -1)
        return AdapterTokens(found.flatten().int(), len(self.numbers), self.numbers)
