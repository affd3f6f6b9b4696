"""Which published blocks lie in which slots of a file, and which are to be written next."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

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
        self._free = [slot for slot in reversed(range(num_slots)) if self._names[slot] is None]
        self._hottest = max(self._heats, default=0)

    def sweep(self, published: Iterable[tuple[int, Name]]) -> Iterator[Save | None]:
        """For each of these blocks, the hottest first, what to write now; None: it is saved already.

        Ends when all slots are taken. A block counts as saved once it is yielded; in a full file it takes the slot of the
        coldest one that this sweep has not come by.
        """
        before = self._hottest
        heat = self._hottest = before + len(self._names)
        coldest = self._coldest(before)
        for block_id, name in islice(published, len(self._names)):
            slot = self._slots.get(name)
            if slot is not None:
                self._heats[slot] = heat
                yield None
            else:
                slot = self._free.pop() if self._free else next(coldest)
                if (other := self._names[slot]) is not None:
                    del self._slots[other]
                self._names[slot], self._heats[slot], self._slots[name] = name, heat, slot
                yield Save(block_id, name, slot, heat)
            heat -= 1

    def _coldest(self, most: int) -> Iterator[int]:
        """Slots in the order of their heats, which are at most `most` when it comes to them."""
        heap = [(heat, slot) for slot, heat in enumerate(self._heats) if heat <= most]
        heapq.heapify(heap)
        while heap:
            _, slot = heapq.heappop(heap)
            if self._heats[slot] <= most:
                yield slot

    def heats(self) -> Iterator[tuple[int, int]]:
        """Slot and heat of each block."""
        return ((slot, self._heats[slot]) for slot in self._slots.values())
