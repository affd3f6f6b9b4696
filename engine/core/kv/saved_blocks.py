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

    block_id: int  # or its slot in host memory
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
        self._unused = (slot for slot in range(num_slots) if slot not in self._names)
        self._forgotten: list[int] = []  # free again
        self._unwritten: set[Name] = set()  # assigned to slots, and not written yet
        self._hottest = max(self._heats.values(), default=0)
        self._to_replace: Iterator[int] = iter(())  # slots by increasing heat, for `assign`
        self.to_erase: list[int] = []  # slots whose content must not be found again: the caller empties this list

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: Name) -> bool:
        """Return whether a block is written."""
        return name in self._slots and name not in self._unwritten

    def has_slot(self, name: Name) -> bool:
        """Return whether a block is written, or is to be."""
        return name in self._slots

    def is_at(self, name: Name, slot: int) -> bool:
        """Return whether a slot is still that of a block."""
        return self._slots.get(name) == slot

    def use(self, name: Name) -> int:
        """Return the slot of a block, which is the hottest one now."""
        slot = self._slots[name]
        self._hottest += 1
        self._heats[slot] = self._hottest
        return slot

    def assign(self, block_id: int, name: Name) -> Save:
        """Give a block a free slot, or that of the coldest block; there must be slots. It is the hottest one now."""
        if (slot := self._free_slot()) is None and (slot := next(self._to_replace, None)) is None:
            self._to_replace = self._coldest(self._hottest)
            slot = next(self._to_replace)
        self._hottest += 1
        return self._take(slot, block_id, name, self._hottest)

    def _free_slot(self) -> int | None:
        return self._forgotten.pop() if self._forgotten else next(self._unused, None)

    def _take(self, slot: int, block_id: int, name: Name, heat: int) -> Save:
        if (before := self._names.get(slot)) is not None:
            del self._slots[before]
            self._unwritten.discard(before)
        self._names[slot], self._heats[slot], self._slots[name] = name, heat, slot
        self._unwritten.add(name)
        return Save(block_id, name, slot, heat)

    def written(self, name: Name, slot: int) -> None:
        """Record that a block is in its slot."""
        if self.is_at(name, slot):
            self._unwritten.discard(name)

    def forget(self, name: Name) -> None:
        """Forget a block whose content is not to be used, or is not there."""
        if (slot := self._slots.pop(name, None)) is not None:
            self._unwritten.discard(name)
            del self._names[slot], self._heats[slot]
            self._forgotten.append(slot)
            self.to_erase.append(slot)

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
                if (slot := self._free_slot()) is None and (slot := next(coldest, None)) is None:
                    return  # all others have become hotter since this sweep began
                yield self._take(slot, block_id, name, heat)
            heat -= 1

    def _coldest(self, most: int) -> Iterator[int]:
        """Yield slots by increasing heat. A slot with a heat above `most` at that time is skipped."""
        heap = [(heat, slot) for slot, heat in self._heats.items() if heat <= most]
        heapq.heapify(heap)
        while heap:
            _, slot = heapq.heappop(heap)
            if self._heats.get(slot, most + 1) <= most:  # else it is hotter or free by now
                yield slot

    def heats(self) -> Iterator[tuple[int, int]]:
        """Return slot and heat of each saved block."""
        return ((slot, self._heats[slot]) for slot in self._slots.values())
