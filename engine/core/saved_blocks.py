"""Which published blocks lie in which slots of a file, and which are to be written next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.core.block_pool import Name


@dataclass(frozen=True, slots=True)
class Save:
    """A block to be written to a slot. `heat`: the higher, the longer it is to be kept."""

    block_id: int
    name: Name
    slot: int
    heat: int


class SavedBlocks:
    """The file follows the pool: its hottest blocks, and as long as there are slots, what the pool has evicted since."""

    def __init__(self, num_slots: int, saved: Iterable[tuple[Name, int, int]] = ()) -> None:
        """`saved`: name, slot and heat of each block in the file."""
        self._names: list[Name | None] = [None] * num_slots
        self._heats = [0] * num_slots
        self._slots: dict[Name, int] = {}
        for name, slot, heat in saved:
            self._names[slot], self._heats[slot], self._slots[name] = name, heat, slot
        self._hottest = max(self._heats, default=0)

    def plan(self, published: Sequence[tuple[int, Name]]) -> list[Save]:
        """What to write, in this order, so that the file holds these blocks, the hottest first, or as many as fit.

        The slots of the coldest others are taken. Nothing changes before `put`, but the heat of what is saved already.
        """
        wanted = published[: len(self._names)]
        self._hottest += len(wanted)
        lacking: list[tuple[int, Name, int]] = []
        kept = set()
        for rank, (block_id, name) in enumerate(wanted):
            heat, slot = self._hottest - rank, self._slots.get(name)
            if slot is None:
                lacking.append((block_id, name, heat))
            else:
                self._heats[slot] = heat
                kept.add(slot)
        others = [slot for slot in range(len(self._names)) if slot not in kept]
        others.sort(key=lambda slot: (self._names[slot] is not None, self._heats[slot]))
        return [Save(block_id, name, slot, heat) for (block_id, name, heat), slot in zip(lacking, others, strict=False)]

    def put(self, save: Save) -> None:
        """The slot holds that block from now on, and no other."""
        if (before := self._names[save.slot]) is not None:
            del self._slots[before]
        self._names[save.slot], self._heats[save.slot], self._slots[save.name] = save.name, save.heat, save.slot

    def heats(self) -> Iterator[tuple[int, int]]:
        """Slot and heat of each block."""
        return ((slot, self._heats[slot]) for slot in self._slots.values())
