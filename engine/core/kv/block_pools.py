"""The pools of KV blocks: one for each size of blocks in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.cache_groups import SPARE_STATES, CacheGroup

UNHELD = -1  # block table entry where the request holds no block: no query reads or writes it


def held_ids(table: Iterable[int]) -> list[int]:
    """Return the blocks in a part of a block table, without its holes."""
    return [block_id for block_id in table if block_id != UNHELD]


class BlockPools:
    """Pools by cache group. Groups whose blocks have one size share a pool, so each can use what another releases.

    Block ids count from 0 in each pool.
    """

    def __init__(self, num_blocks: Sequence[int], groups: Sequence[CacheGroup]) -> None:
        """`num_blocks`: of each pool."""
        assert {group.pool for group in groups} == set(range(len(num_blocks))), "a pool for each size of blocks"
        self.pools = [BlockPool(count, len(groups)) for count in num_blocks]
        self.of_group = [self.pools[group.pool] for group in groups]
        self._have_states = [any(group.is_state for group in groups if group.pool == p) for p in range(len(num_blocks))]
        self._groups_of = [[g for g, group in enumerate(groups) if group.pool == p] for p in range(len(num_blocks))]

    @property
    def num_blocks(self) -> list[int]:
        return [pool.num_blocks for pool in self.pools]

    @property
    def num_free(self) -> int:
        """Number of blocks of all pools that no request holds: empty or evictable."""
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_releases(self) -> int:
        """A number that changes whenever a request releases blocks."""
        return sum(pool.num_releases for pool in self.pools)

    @property
    def version(self) -> int:
        """A number that changes with every change of the published blocks."""
        return sum(pool.version for pool in self.pools)

    def finder(self, group: int) -> Callable[[bytes], int | None]:
        """See `BlockPool.finder`."""
        return self.of_group[group].finder(group)

    def has_room(self, counts: Sequence[int], held: Sequence[Sequence[int]], num_spare: int) -> bool:
        """Return whether each group can take `counts` new blocks and hold published ones, with `num_spare` blocks for
        each group left free in every pool. Of states, fewer are: a request needs a second one for a few tokens only.
        """
        for pool, groups, has_states in zip(self.pools, self._groups_of, self._have_states, strict=True):
            num_taken = -(-num_spare // SPARE_STATES) if has_states else num_spare * len(groups)
            for g in groups:
                num_taken += counts[g] + (pool.num_unheld(held[g]) if held[g] else 0)
            if num_taken > pool.num_free:
                return False
        return True

    def release(self, group: int, table: Iterable[int]) -> None:
        """Remove a holder from each block in a part of a group's block table, in this order."""
        self.of_group[group].release(held_ids(table))

    def unpublish(self, group: int, table: Iterable[int]) -> None:
        """See `BlockPool.unpublish`."""
        self.of_group[group].unpublish(held_ids(table))

    def was_cached(self, block_hash: bytes) -> bool:
        """See `BlockPool.was_cached`."""
        return any(pool.was_cached(block_hash) for pool in self.pools)

    def reset(self) -> bool:
        """Evict everything. Returns False, without any change, while a block is held."""
        is_free = all(pool.num_free == pool.num_blocks for pool in self.pools)
        if is_free:
            for pool in self.pools:
                pool.reset()
        return is_free

    def check(self, tables: Sequence[Sequence[Sequence[int]]]) -> list[Counter[int]]:
        """Assert all invariants, given the held parts of all requests' block tables, by group. Returns the number of
        holders of each block, by group.
        """
        found: dict[int, Counter[int]] = {}
        for p, (pool, groups) in enumerate(zip(self.pools, self._groups_of, strict=True)):
            found[p] = Counter(block_id for g in groups for table in tables[g] for block_id in held_ids(table))
            pool.check(found[p])
        return [found[self.pools.index(pool)] for pool in self.of_group]
