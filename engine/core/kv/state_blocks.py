"""Rules of state groups: which blocks a request holds, and which of them stay in the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.kv.block_pools import UNHELD, BlockPools
from engine.core.kv.cache_groups import MAX_STATES, CacheGroup, kept_blocks
from engine.core.request import Request

CHECKPOINT_TOKENS = 1024  # distance of the states that are kept while there are empty blocks for them


class StateBlocks:
    """The state groups of a `BlockManager`.

    **Checkpoints.** These states stay in the prefix cache: the last full block of a prompt, that where a prompt leaves
    a cached one whose state is not kept, the ends of a long prompt's chunks, one of each `CHECKPOINT_TOKENS` tokens,
    and the last full block of a request. All others are emptied once a request has passed them, so that long outputs do
    not evict checkpoints. A request holds no checkpoint for longer than it reads it: while it decodes, it holds one
    state, and at the start of a block for two steps a second one. So checkpoints give way when states are short.

    **Order in a step.** A recurrent layer reads the states of all sequences of a step before it has written any. So a
    state cannot be found in the step that computes it: a request that would continue from it waits for the next step.
    """

    def __init__(self, groups: Sequence[CacheGroup], pools: BlockPools, block_size: int, caches: bool) -> None:
        """`caches`: there is a prefix cache."""
        self.groups = [g for g, group in enumerate(groups) if group.is_state]
        self._max_retracted = [group.max_retracted for group in groups]
        self._pools, self._size, self._caches = pools, block_size, caches
        self._new: set[tuple[int, int]] = set()  # group and block of the states that the planned step computes
        self.version = 0  # changes when states can be found that could not before

    def start_step(self) -> None:
        """Begin to plan a step: what the last one computes can be found now."""
        if self._new:
            self._new.clear()
            self.version += 1

    def publish(self, group: int, block_hash: bytes, block_id: int) -> None:
        """See `BlockPool.publish`."""
        self._pools.of_group[group].publish(group, block_hash, block_id)
        self._new.add((group, block_id))

    def finder(self, group: int, with_new: bool) -> Callable[[bytes], int | None]:
        """See `BlockPool.finder`. `with_new`: also find states that the planned step computes."""
        find = self._pools.finder(group)
        if with_new or not self._new:
            return find

        def find_old(block_hash: bytes) -> int | None:
            block_id = find(block_hash)
            return None if block_id is None or (group, block_id) in self._new else block_id

        return find_old

    @property
    def has_new(self) -> bool:
        """True if the planned step computes states that later steps can find."""
        return bool(self._new)

    def wanted(self, request: Request, group: int, first: int, start: int, end: int, num_spare: int) -> list[bool]:
        """Return for each block from index `first` on whether the request gets one, for a step that computes the tokens
        from `start` to `end`.
        """
        size, count = self._size, -(-end // self._size)
        most = min(self._max_retracted[group], end - start)  # a step without drafts takes back one token
        kept = kept_blocks(start, end, size, self._caches, most)
        if self._caches:
            kept |= {self._end_of_prompt(request), request.branch}
            kept |= self._spread(group, first, count, num_spare)
        return [index in kept for index in range(first, count)]

    def _end_of_prompt(self, request: Request) -> int:
        """Return the index of the last block from which the same prompt with another end continues."""
        return (request.num_prompt_tokens - 1) // self._size - 1

    def _spread(self, group: int, first: int, end: int, num_spare: int) -> set[int]:
        """Return blocks at regular distances among those from `first` to `end`, as far as there is room to spare."""
        every = -(-CHECKPOINT_TOKENS // self._size)
        at = range(first + (every - 1 - first) % every, end, every)
        room = (self._pools.of_group[group].num_empty - num_spare - MAX_STATES) // 2
        return set(at[-room:]) if room > 0 else set()

    def pass_by(self, request: Request, group: int, first: int, name: Callable[[Request, int], bytes]) -> None:
        """Release the request's blocks before index `first`. The last of them stays in the prefix cache until the
        request has passed the next one, checkpoints until they are evicted; the others are emptied. `name`: of a
        block of the request, by its index.
        """
        size, table, num_passed = self._size, request.block_tables[group], request.num_passed[group]
        passed = [(i, table[i]) for i in range(num_passed, first) if table[i] != UNHELD]
        self._pools.release(group, [block_id for _, block_id in passed])
        if not self._caches or first <= num_passed:
            return
        if num_passed:
            last = self._pools.finder(group)(name(request, num_passed - 1))
            passed += [] if last is None else [(num_passed - 1, last)]
        in_prompt = max(self._end_of_prompt(request), request.branch)
        rest = [each for i, each in passed if in_prompt < i < first - 1 and (i + 1) * size % CHECKPOINT_TOKENS]
        self._pools.of_group[group].discard(rest)
