"""The tiers of the prefix cache below the device: which evicted blocks host memory keeps, which ones a file has, and
which come back. Names only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from engine.core.batch import BlockLoad, BlockMoves
from engine.core.host_load import NOTHING_TO_LOAD, FileLoad, HostLoad
from engine.core.kv.block_pool import Name
from engine.core.kv.block_pools import BlockPools, held_ids
from engine.core.kv.saved_blocks import SavedBlocks

IN_HOST = -2  # block table entry of a block that is not on the device, but in host memory or in the file
MIN_LOADED_TOKENS = 256  # fewer are computed in less time than it takes to wait for them
MAX_LOADS = 4  # at a time


class HostSlots:
    """The slots for blocks of one pool, by name. When all are taken, the least recently used one is given away."""

    def __init__(self) -> None:
        self.num_slots = 0
        self._slots: OrderedDict[Name, int] = OrderedDict()  # the least recently used first
        self._free: list[int] = []
        self._pins: Counter[int] = Counter()  # slots that loads read

    def resize(self, num_slots: int) -> None:
        """Have this many slots, at least as many as before unless all are free."""
        if num_slots < self.num_slots:
            assert len(self._free) == self.num_slots
            self._free, self.num_slots = [], 0
        self._free[:0] = reversed(range(self.num_slots, num_slots))
        self.num_slots = num_slots

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: Name) -> bool:
        return name in self._slots

    def keep(self, name: Name) -> int | None:
        """Return the slot to which a block is copied; None: it is there, or there is no room."""
        if name in self._slots:
            self._slots.move_to_end(name)
            return None
        if not self._free:
            oldest = next((each for each, slot in self._slots.items() if slot not in self._pins), None)
            if oldest is None:
                return None
            self._free.append(self._slots.pop(oldest))
        slot = self._slots[name] = self._free.pop()
        return slot

    def pin(self, name: Name) -> int:
        """Return the slot of a block, which keeps its content until `unpin`."""
        self._slots.move_to_end(name)
        slot = self._slots[name]
        self._pins[slot] += 1
        return slot

    def unpin(self, slot: int, name: Name) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if self._slots.get(name) != slot:  # forgotten meanwhile
                self._free.append(slot)

    def slot(self, name: Name) -> int | None:
        """Return the slot of a block; None: it has none."""
        return self._slots.get(name)

    def forget(self, name: Name) -> None:
        slot = self._slots.pop(name, None)
        if slot is not None and slot not in self._pins:
            self._free.append(slot)

    def clear(self) -> None:
        """Forget all blocks."""
        for name in list(self._slots):
            self.forget(name)

    def free(self) -> list[int]:
        """Return the slots without a block."""
        return self._free

    def check(self, loading: Iterable[int]) -> None:
        """Assert all invariants, given the slots that loads read."""
        assert Counter(loading) == self._pins, "pins are miscounted"
        used = {*self._slots.values(), *self._pins}
        assert len(set(self._slots.values())) == len(self._slots), "two blocks in one slot"
        assert sorted([*self._free, *used]) == list(range(self.num_slots)), "a slot is lost, or both free and used"


class HostTier:
    """Keeps what the pools evict in slots in host memory, and loads it when a request has that prefix.

    A block stays in its slot when it is loaded: evicted again, it need not be copied. The worker copies between steps,
    see `BlockMoves`. A load takes blocks and holds them, with those of the prefix that are on the device, until it has
    arrived. Then they are published. The request waits in the queue meanwhile, and others run.

    Below it may be a file for each pool, see `PrefixCacheStore`. It may have no slots then. What is loaded from a file
    goes straight to the device.
    """

    def __init__(self, pools: BlockPools) -> None:
        self._pools = pools
        self._slots = [HostSlots() for _ in pools.pools]
        self._pool_of = [pools.pools.index(pool) for pool in pools.of_group]
        self._loads: dict[int, HostLoad] = {}
        self._loading: dict[Name, HostLoad] = {}  # blocks to publish once they have arrived
        self._num_begun = 0
        self._moves = BlockMoves([], [], [])
        self.saved: list[SavedBlocks | None] = [None] * len(self._slots)  # what each pool's file has; None: it has none
        self._file_loads: list[list[FileLoad]] = [[] for _ in self._slots]  # from each pool's file, not begun
        self._copying: set[int] = set()  # loads that still copy from host memory
        self._saving: list[tuple[Name, int]] = []  # blocks that are written to a file from their slots
        # Called with each block of a pool that gets a slot.
        self.on_keep: list[Callable[[Name], None] | None] = [None] * len(self._slots)
        self.num_damaged = 0  # blocks that a file had lost
        self.queries = self.hits = 0  # prompt tokens: looked up here, since they are not on the device, and found
        for index, pool in enumerate(pools.pools):
            pool.on_evict = partial(self._keep, index)

    def resize(self, num_slots: Sequence[int]) -> None:
        """Have this many slots for each pool, at least as many as before unless all are free."""
        for slots, count in zip(self._slots, num_slots, strict=True):
            slots.resize(count)

    @property
    def num_slots(self) -> int:
        return sum(slots.num_slots for slots in self._slots)

    @property
    def num_saved(self) -> int:
        """Number of blocks in the files."""
        return sum(len(saved) for saved in self.saved if saved is not None)

    @property
    def num_used(self) -> int:
        """Number of slots with blocks."""
        return sum(len(slots) for slots in self._slots)

    def _keep(self, pool: int, name: Name, block_id: int) -> None:
        if (slot := self._slots[pool].keep(name)) is not None:
            self._moves.spills.append((pool, block_id, slot))
            if (on_keep := self.on_keep[pool]) is not None:
                on_keep(name)

    def take_moves(self) -> BlockMoves | None:
        """Return what to copy before the planned step; None: nothing."""
        moves = self._moves
        if not (moves.spills or moves.loads or moves.arrived):
            return None
        self._moves = BlockMoves([], [], [])
        return moves

    def finder(self, group: int, find: Callable[[bytes], int | None]) -> Callable[[bytes], int | None]:
        """Return a function that finds a group's block as `find` does, or says that it is `IN_HOST`."""
        pool = self._pool_of[group]
        slots, saved = self._slots[pool], self.saved[pool]

        def found(block_hash: bytes) -> int | None:
            block_id = find(block_hash)
            if block_id is not None:
                return block_id
            name = group, block_hash
            return IN_HOST if name in slots or (saved is not None and name in saved) else None

        return found

    def pin(self, name: Name) -> int | None:
        """Return the slot of a block, which keeps its content until `unpin`; None: it has none."""
        if (slot := self._pinned(name)) is not None:
            self._saving.append((name, slot))
        return slot

    def unpin(self, name: Name, slot: int) -> None:
        """End `pin`."""
        self._saving.remove((name, slot))
        self._slots[self._pool_of[name[0]]].unpin(slot, name)

    def take_file_loads(self, pool: int) -> list[FileLoad]:
        """Return what to read from a pool's file. Its blocks are free for that once the planned step is launched."""
        loads, self._file_loads[pool] = self._file_loads[pool], []
        return loads

    @property
    def has_loads(self) -> bool:
        """True while blocks are on their way to the device."""
        return bool(self._loads)

    @property
    def copies_from_host(self) -> bool:
        """True while blocks are on their way from host memory."""
        return bool(self._copying)

    def must_wait(self, names: Iterable[Name]) -> bool:
        """Return whether a load of these blocks must wait: for loads of the same ones, or since there are too many."""
        return len(self._loads) >= MAX_LOADS or any(name in self._loading for name in names)

    def begin(self, tables: list[list[int]], names: list[Name], num_spare: int) -> HostLoad | None:
        """Begin to load the blocks that are `IN_HOST` in `tables`, the first entries of each group's block table. Their
        `names` are in the same order. Returns None unless `num_spare` blocks of each group remain free: wait until
        some are released; or `NOTHING_TO_LOAD` if all are free already.
        """
        counts = [table.count(IN_HOST) for table in tables]
        held = [[block_id for block_id in held_ids(table) if block_id != IN_HOST] for table in tables]
        if not self._pools.has_room(counts, held, num_spare):
            return None if self._pools.num_free < sum(self._pools.num_blocks) else NOTHING_TO_LOAD
        for group, block_ids in enumerate(held):
            self._pools.of_group[group].hold(block_ids)
        slots = [self._pinned(name) for name in names]  # before blocks are evicted
        taken = [self._pools.of_group[group].take(count) for group, count in enumerate(counts)]
        rest = [iter(block_ids) for block_ids in taken]
        tables = [[next(rest[g]) if each == IN_HOST else each for each in table] for g, table in enumerate(tables)]
        self._num_begun += 1
        load = HostLoad(self._num_begun, names, slots, [block_id for ids in taken for block_id in ids], tables)
        self._loads[load.number] = load
        self._loading.update(dict.fromkeys(names, load))
        self._begin_ways(load)
        return load

    def _pinned(self, name: Name) -> int | None:
        slots = self._slots[self._pool_of[name[0]]]
        return slots.pin(name) if name in slots else None

    def _begin_ways(self, load: HostLoad) -> None:
        copies = list[tuple[int, int, int]]()
        of_files: list[list[tuple[int, Name, int]]] = [[] for _ in self._slots]
        for name, slot, block_id in zip(load.names, load.slots, load.block_ids, strict=True):
            pool = self._pool_of[name[0]]
            if slot is not None:
                copies.append((pool, slot, block_id))
            else:
                saved = self.saved[pool]
                assert saved is not None
                of_files[pool].append((saved.use(name), name, block_id))
        if copies:
            self._moves.loads.append(BlockLoad(load.number, copies))
            self._copying.add(load.number)
        for pool, blocks in enumerate(of_files):
            if blocks:
                self._file_loads[pool].append(FileLoad(load.number, blocks))
        load.num_ways = bool(copies) + sum(map(bool, of_files))

    def record(self, num_queried: int, load: HostLoad, num_found: int) -> None:
        """Count the prompt tokens of a new request that were not on the device, and those that `load` brings."""
        self.queries += num_queried
        self.hits += 0 if load.is_done else num_found

    def arrived(self, numbers: Iterable[int]) -> None:
        """Record that what these loads copy from host memory is on the device."""
        for number in numbers:
            if (load := self._loads.get(number)) is not None:  # else dropped by `clear`
                self._moves.arrived.append(number)
                self._copying.discard(number)
                self._end_way(load)

    def is_loading(self, number: int) -> bool:
        """Return whether a load goes on: else its blocks are others' by now."""
        return number in self._loads

    def read(self, number: int, failed: Collection[Name]) -> None:
        """Record that what a load reads from one file is on the device, but for the blocks that `failed`."""
        if (load := self._loads.get(number)) is not None:
            load.failed.update(failed)
            self._end_way(load)

    def _end_way(self, load: HostLoad) -> None:
        """Publish the blocks of a load once all of them are on the device."""
        load.num_ways -= 1
        if load.num_ways:
            return
        del self._loads[load.number]
        for name, block_id in zip(load.names, load.block_ids, strict=True):
            if self._loading.get(name) is load:
                del self._loading[name]
                if name not in load.failed:
                    self._pools.of_group[name[0]].publish(*name, block_id)
        self._end(load)

    def _end(self, load: HostLoad) -> None:
        """Release what a load holds, the start of the prefix last."""
        for group, table in enumerate(load.tables):
            self._pools.release(group, reversed(table))
        for name, slot in zip(load.names, load.slots, strict=True):
            if slot is not None:
                self._slots[self._pool_of[name[0]]].unpin(slot, name)
        load.is_done = True

    def forget(self, group: int, block_hashes: Iterable[bytes]) -> None:
        """Drop blocks whose content may be corrupt."""
        pool = self._pool_of[group]
        slots, saved = self._slots[pool], self.saved[pool]
        for block_hash in block_hashes:
            slots.forget((group, block_hash))
            self._loading.pop((group, block_hash), None)
            if saved is not None:
                saved.forget((group, block_hash))

    def clear(self) -> None:
        """Drop all blocks, and the loads: either there are none, or the worker has dropped them, too."""
        self._loading.clear()
        for load in self._loads.values():
            self._end(load)
        self._loads.clear()
        for loads in self._file_loads:
            loads.clear()
        self._copying.clear()
        for slots in self._slots:
            slots.clear()
        self._moves = BlockMoves([], [], self._moves.arrived)

    def held(self, group: int) -> list[list[int]]:
        """Return the blocks of a group that each load holds, for checks."""
        return [held_ids(load.tables[group]) for load in self._loads.values()]

    def check(self) -> None:
        """Assert all invariants."""
        for index, slots in enumerate(self._slots):
            loading = [pair for load in self._loads.values() for pair in zip(load.names, load.slots, strict=True)]
            pairs = [*loading, *self._saving]
            slots.check(slot for (group, _), slot in pairs if slot is not None and self._pool_of[group] == index)
