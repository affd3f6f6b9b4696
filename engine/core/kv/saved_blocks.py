"""Assignment of published blocks to the slots of the prefix cache file, and the choice of blocks to write next."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from engine.core.kv.block_pool import Name


@dataclass(frozen=True, slots=True)
class Save:
    """A block to write to a slot. Blocks with a higher `heat` are kept longer."""

    block_id: int
    name: Name
    slot: int
    heat: int


class SavedBlocks:
    """Tracks the file's content: the hottest blocks and, while there are slots, blocks that the pool has evicted."""

    def __init__(self, num_slots: int, saved: Iterable[tuple[Name, int, int]] = ()) -> None:
        """`saved`: name, slot and heat of each block in the file. Memory and time grow with these, not with slots."""
        self._num_slots = num_slots
        self._names: dict[int, Name] = {}
        self._heats: dict[int, int] = {}
        self._slots: dict[Name, int] = {}
        for name, slot, heat in saved:
            self._names[slot], self._heats[slot], self._slots[name] = name, heat, slot
        self._free = (slot for slot in range(num_slots) if slot not in self._names)
        self._hottest = max(self._heats.values(), default=0)

    def sweep(self, published: Iterable[tuple[int, Name]]) -> Iterator[Save | None]:
        """Yield for each of these blocks, the hottest first, its `Save`, or None if the block is already saved.

        Stops when all slots are taken. A block counts as saved once it is yielded. In a full file it replaces the
        coldest block that this sweep has not visited.
        """
        before = self._hottest
        heat = self._hottest = before + self._num_slots
        coldest = self._coldest(before)
        for block_id, name in islice(published, self._num_slots):
            slot = self._slots.get(name)
            if slot is not None:
                self._heats[slot] = heat
                yield None
            else:
                slot = next(self._free, None)
                if slot is None:
                    slot = next(coldest)
                    del self._slots[self._names[slot]]
                self._names[slot], self._heats[slot], self._slots[name] = name, heat, slot
                yield Save(block_id, name, slot, heat)
            heat -= 1

    def _coldest(self, most: int) -> Iterator[int]:
        """Yield slots by increasing heat. A slot with a heat above `most` at that time is skipped."""
        heap = [(heat, slot) for slot, heat in self._heats.items() if heat <= most]
        heapq.heapify(heap)
        while heap:
            _, slot = heapq.heappop(heap)
            if self._heats[slot] <= most:
                yield slot

    def heats(self) -> Iterator[tuple[int, int]]:
        """Return slot and heat of each saved block."""
        return ((slot, self._heats[slot]) for slot in self._slots.values())
