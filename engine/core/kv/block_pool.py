"""The pool of physical KV blocks: holders, cached content, eviction.

The life cycle of a block: free and empty → held by one request, which fills it → published (full, can be found by
name, held by any number of requests) → free but still published, until it is evicted → held again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile

from engine.core.kv.prefix_history import RecentHashes

MAX_EVICTED = 1 << 16  # this many evicted hashes, up to twice as many, are kept to explain cache misses
Name = tuple[int, bytes]  # cache group, and the hash of the prefix that ends with the block


class BlockPool:
    """Blocks 0 to `num_blocks - 1`. Free blocks are taken in the order in which they became free, empty ones first."""

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # the first one is taken next
        self._num_holders = [0] * num_blocks
        self._names: list[Name | None] = [None] * num_blocks  # of published blocks
        self._published: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.num_groups = num_groups
        self.num_publications = 0  # since the start
        self.version = 0  # changes with every change of the published blocks
        self.num_releases = 0  # calls of `release`
        self._suspect: set[int] = set()  # held blocks that were unpublished
        self._evicted = RecentHashes(MAX_EVICTED)
        # Called with each evicted block, not yet written again; with each one that is published.
        self.on_evict: Callable[[Name, int], None] | None = None
        self.on_publish: Callable[[Name, int], None] | None = None

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds: empty or evictable."""
        return len(self._free)

    @property
    def num_empty(self) -> int:
        """Number of free blocks that hold no cached content for certain: held blocks may be published, too."""
        return max(len(self._free) - sum(map(len, self._published)), 0)

    def finder(self, group: int) -> Callable[[bytes], int | None]:
        """Return a function that finds a group's published block by the hash of the prefix that ends with it."""
        return self._published[group].get

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """Return how many of these published blocks are free."""
        return list(map(self._num_holders.__getitem__, block_ids)).count(0)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each of these published blocks."""
        num_holders, free = self._num_holders, self._free
        for block_id in block_ids:
            if not num_holders[block_id]:
                del free[block_id]
            num_holders[block_id] += 1

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks. Their cached content is evicted."""
        taken = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            if (name := self._names[block_id]) is not None:
                group, block_hash = name
                del self._published[group][block_hash]
                self._names[block_id] = None
                self._evicted.add(block_hash)
                self.version += 1
                if self.on_evict is not None:
                    self.on_evict(name, block_id)
            self._num_holders[block_id] = 1
            taken.append(block_id)
        return taken

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove a holder from each block, in this order. Published blocks that become free are evicted last."""
        num_holders, free, names = self._num_holders, self._free, self._names
        self.num_releases += 1
        for block_id in block_ids:
            num_holders[block_id] -= 1
            if not num_holders[block_id]:
                free[block_id] = None
                if names[block_id] is None:
                    free.move_to_end(block_id, last=False)
        if self._suspect:
            self._suspect = {block_id for block_id in self._suspect if num_holders[block_id]}

    def publish(self, group: int, block_hash: bytes, block_id: int) -> None:
        """Publish a full block as the end of a prefix, unless another block is already published for it."""
        if self._published[group].setdefault(block_hash, block_id) == block_id:
            self._names[block_id] = group, block_hash
            self.num_publications += 1
            self.version += 1
            if self.on_publish is not None:
                self.on_publish((group, block_hash), block_id)

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Forget the names of these blocks. Held ones are suspect until their last holder releases them."""
        for block_id in block_ids:
            if self._forget(block_id) and self._num_holders[block_id]:
                self._suspect.add(block_id)

    def discard(self, block_ids: Iterable[int]) -> None:
        """Empty those of these blocks that no request holds."""
        for block_id in block_ids:
            if not self._num_holders[block_id]:
                self._forget(block_id)

    def _forget(self, block_id: int) -> bool:
        """Forget the name of a block. Returns False if it has none."""
        if (name := self._names[block_id]) is None:
            return False
        group, block_hash = name
        del self._published[group][block_hash]
        self._names[block_id] = None
        if not self._num_holders[block_id]:
            self._free.move_to_end(block_id, last=False)
        self.version += 1
        return True

    def published(self) -> Iterator[tuple[int, Name]]:
        """Yield the published blocks and their names as of the first call, the one to be evicted last first."""
        held = range(self.num_blocks) if len(self._free) < self.num_blocks else ()
        order = [block_id for block_id in held if self._num_holders[block_id]]
        order += reversed(self._free)
        for block_id in order:
            if (name := self._names[block_id]) is not None:
                yield block_id, name

    def restore(self, blocks: Sequence[tuple[int, Name]]) -> None:
        """Publish free and empty blocks under names that no other block has. The first one is evicted last."""
        for block_id, (group, block_hash) in reversed(blocks):
            self._published[group][block_hash], self._names[block_id] = block_id, (group, block_hash)
            self._free.move_to_end(block_id)
        self.version += 1

    def reset(self) -> bool:
        """Evict everything. Returns False, without any change, while a block is held."""
        if len(self._free) < self.num_blocks:
            return False
        self._names = [None] * self.num_blocks
        self._evicted.clear()
        for published in self._published:
            published.clear()
        self.version += 1
        return True

    def was_cached(self, block_hash: bytes) -> bool:
        """Return whether a block for that prefix was evicted recently, or is published in some group."""
        return block_hash in self._evicted or any(block_hash in published for published in self._published)

    def name_of(self, block_id: int) -> Name | None:
        """Return the name of a block, or None if it is not published."""
        return self._names[block_id]

    def is_suspect(self, block_id: int) -> bool:
        """Return whether a held block was unpublished because its content may be corrupt."""
        return block_id in self._suspect

    def free_and_empty(self) -> list[int]:
        """Return the free blocks without cached content."""
        return [block_id for block_id in self._free if self._names[block_id] is None]

    def check(self, held: Counter[int]) -> None:
        """Assert all invariants, given the number of holders of each held block.

        Takes Python's time for held and published blocks only: most of a large pool is free and empty.
        """
        num_holders, names = [0] * self.num_blocks, self._names
        for block_id, count in held.items():
            num_holders[block_id] = count
        assert self._num_holders == num_holders, "holders are miscounted"
        assert len(self._free) == num_holders.count(0), "a block is lost"
        assert min(self._free, default=0) >= 0, "a block is lost"
        assert not any(map(num_holders.__getitem__, self._free)), "a block is both free and held"
        num_named = self.num_blocks - names.count(None)
        assert num_named == sum(map(len, self._published)), "a name finds no block"
        for g, found in enumerate(self._published):
            assert all(names[found[key]] == (g, key) for key in found), "names and blocks disagree"
        num_last = sum(1 for _ in takewhile(lambda block_id: names[block_id] is not None, reversed(self._free)))
        num_free_named = num_named - sum(names[block_id] is not None for block_id in held)
        assert num_last == num_free_named, "an empty free block waits behind a cached one"
