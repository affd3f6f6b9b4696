"""Assigns KV blocks to requests in each cache group, and finds blocks that the prefix cache already has."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.core.kv.block_pools import UNHELD, BlockPools, held_ids
from engine.core.kv.cache_groups import FULL, CacheGroup, longest_sequence, most_blocks
from engine.core.kv.prefix_loads import PrefixLoads
from engine.core.kv.prefix_matcher import PrefixMatcher
from engine.core.kv.state_blocks import StateBlocks
from engine.core.request import Request
from engine.core.tiers import HostTier


@dataclass(slots=True)
class _Growth:
    """The blocks that a request gets in each cache group."""

    tables: list[list[int]]
    num_passed: list[int]
    held: list[Sequence[int]]  # cached blocks to hold
    counts: list[int]  # new blocks
    wanted: dict[int, list[bool]]  # state group → for each new entry of the table, whether it is one of these blocks


class BlockManager:
    """Block tables with `block_size` tokens per block, one for each cache group.

    Entry i of a table is the block of tokens `i * block_size` to `(i + 1) * block_size - 1`, or `UNHELD`. A group with
    a sliding window releases blocks that no later query reads; their entries stay in the table, below
    `Request.num_passed`. Groups with blocks of one size in bytes share a pool, which is not divided among them. Groups
    of recurrent layers hold few blocks, see `StateBlocks`.

    `PrefixMatcher` says what a block's name is, and finds cached prefixes. If two requests compute the same content at
    the same time, each keeps its own block. The first block is published; the other stays private and is empty once it
    is released.

    **No locks.** Steps run on the device in launch order, and within each layer a step stores the KV of all its tokens
    before any of them attends. Therefore
    - a block that is released while a launched step still reads or writes it may be assigned again at once: the writes
      of its new holder are launched later;
    - a block may be published, and hit by another request, in the same step that fills it.
    A stale write never corrupts another request: a request writes only to unpublished blocks that it alone holds, and a
    block that it loses is written or published again only by a later step.
    """

    def __init__(
        self,
        num_blocks: int | Sequence[int],
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: Sequence[CacheGroup] = (FULL,),
        max_chunk: int = sys.maxsize,
        has_tiers: bool = False,
    ) -> None:
        """`num_blocks`: of the only pool, or of each. `max_chunk`: maximum number of tokens that a step computes for
        one request. `has_tiers`: evicted blocks are kept in host memory or a file, see `HostTier`.
        """
        assert block_size >= 1
        assert groups
        self.groups = tuple(groups)
        self.pools = BlockPools([num_blocks] if isinstance(num_blocks, int) else num_blocks, self.groups)
        self.block_size = block_size
        self.enable_prefix_caching, self.max_chunk = enable_prefix_caching, max_chunk
        self.tier = HostTier(self.pools) if has_tiers and enable_prefix_caching else None
        self._passing = [(index, group) for index, group in enumerate(self.groups) if group.passes]
        self._states = StateBlocks(self.groups, self.pools, block_size, enable_prefix_caching)
        self._prefixes = PrefixMatcher(
            self.groups, self.pools, self._states, self.tier, block_size, enable_prefix_caching
        )
        self._loads = None
        if self.tier is not None:
            self._loads = PrefixLoads(self.tier, self._prefixes, block_size, keeps_all=not self._passing)
        self._state_pools = [self.pools.of_group[g] for g in self._states.groups]
        self.num_states = sum(pool.num_blocks for pool in self._state_pools)
        self.num_blocks = sum(self.pools.num_blocks) - self.num_states  # of the KV cache

    @property
    def num_free_blocks(self) -> int:
        """Number of KV blocks that no request holds: empty or evictable."""
        return self.pools.num_free - self.num_free_states

    @property
    def num_free_states(self) -> int:
        """Number of states that no request holds: empty or evictable."""
        return sum(pool.num_free for pool in self._state_pools)

    @property
    def version(self) -> int:
        """A number that changes with what `match_prefix` may find."""
        return self.pools.version + self._states.version

    def start_step(self) -> None:
        """Begin to plan a step."""
        self._states.start_step()

    def most_held(self, num_tokens: int) -> list[int]:
        """Return the maximum number of blocks of each pool that a request of `num_tokens` tokens holds at a time."""
        return most_blocks(self.groups, num_tokens, self.block_size, self.max_chunk)

    def can_hold(self, num_tokens: int) -> bool:
        """Return whether a request of `num_tokens` tokens can run alone."""
        most_held = zip(self.most_held(num_tokens), self.pools.num_blocks, strict=True)
        return all(most <= num_blocks for most, num_blocks in most_held)

    def longest(self, max_tokens: int) -> int:
        """Return the length of the longest request that can run alone, up to `max_tokens`."""
        return longest_sequence(self.groups, self.pools.num_blocks, self.block_size, self.max_chunk, max_tokens)

    def capacity(self, num_tokens: int) -> int:
        """Return how many tokens fit in the KV cache as sequences of `num_tokens`, rounded up to whole blocks."""
        num_tokens = -(-num_tokens // self.block_size) * self.block_size
        most_held = zip(self.pools.pools, self.most_held(num_tokens), strict=True)
        of_kv = ((pool.num_blocks, most) for pool, most in most_held if pool not in self._state_pools)
        return min(num_blocks * num_tokens // most for num_blocks, most in of_kv)

    def match_prefix(self, request: Request) -> list[list[int]]:
        """See `PrefixMatcher.match`."""
        return self._prefixes.match(request)

    def weights_replaced(self, change: int) -> None:
        """Count how often weights were replaced: that is part of the names of blocks. The cache is empty."""
        self._prefixes.weights_version += change

    def awaits_state(self, request: Request, num_matched: int) -> bool:
        """See `PrefixMatcher.awaits_state`."""
        return self._prefixes.awaits_state(request, num_matched)

    def explain_miss(self, request: Request, num_matched: int) -> tuple[str, int]:
        """See `PrefixMatcher.explain_miss`."""
        return self._prefixes.explain_miss(request, num_matched)

    @property
    def has_loads(self) -> bool:
        """True while blocks are on their way to the device."""
        return self.tier is not None and self.tier.has_loads

    def awaits_load(self, request: Request, num_spare: int) -> bool:
        """See `PrefixLoads.awaits`."""
        return self._loads is not None and self._loads.awaits(request, num_spare)

    def grow(
        self,
        request: Request,
        num_tokens: int,
        cached: Sequence[Sequence[int]] = (),
        num_spare: int = 0,
        step_end: int = 0,
    ) -> list[list[int]] | None:
        """Append blocks to the request's tables until `num_tokens` tokens fit: first `cached`, from `match_prefix`,
        then new ones.

        A group with a window releases blocks that no later query reads, and gets blocks for one step at most. A state
        group does so, too, and gets entries for the tokens before `step_end` alone (0: `num_tokens`), where the step
        ends. Returns the new entries of each group, or None, without any change, unless `num_spare` blocks for each
        group remain free.
        """
        size, of_group = self.block_size, self.pools.of_group
        if request.block_tables and self._passing:
            self.give_back_passed(request)
        growth = self._growth(request, num_tokens, cached, num_spare, step_end or num_tokens)
        if not self.pools.has_room(growth.counts, growth.held, num_spare):
            return None
        tables, num_cached = growth.tables, len(cached[0]) if cached else 0
        if num_cached:
            for pool, block_ids in zip(of_group, growth.held, strict=True):
                pool.hold(block_ids)
        new_ids = [pool.take(count) for pool, count in zip(of_group, growth.counts, strict=True)]
        for g, wanted in growth.wanted.items():
            taken = iter(new_ids[g])
            new_ids[g] = [next(taken) if is_wanted else UNHELD for is_wanted in wanted]
        if not request.block_tables:
            request.num_cached_blocks, request.num_admitted_tokens = num_cached, len(request.token_ids)
            if self.enable_prefix_caching:
                request.next_commit = (num_cached + 1) * size
        for g, table in enumerate(tables):
            table += cached[g] if num_cached else ()
            table += new_ids[g]
        request.block_tables, request.num_passed = tables, growth.num_passed
        request.num_slots = min(map(len, tables)) * size
        self._plan_return(request)
        return new_ids

    def fits(self, request: Request, num_tokens: int, cached: Sequence[Sequence[int]], num_spare: int) -> bool:
        """Return whether `grow` would succeed for a request that holds no block."""
        growth = self._growth(request, num_tokens, cached, num_spare, num_tokens)
        return self.pools.has_room(growth.counts, growth.held, num_spare)

    def lacks_states(self, request: Request, num_tokens: int) -> bool:
        """Return whether there are too few states for the next step of a request, up to `num_tokens` tokens."""
        counts, of_group = self._growth(request, num_tokens, (), 0, num_tokens).counts, self.pools.of_group
        return any(counts[g] > of_group[g].num_free for g in self._states.groups)

    def _growth(
        self, request: Request, num_tokens: int, cached: Sequence[Sequence[int]], num_spare: int, step_end: int
    ) -> _Growth:
        """Return what `grow` needs."""
        size, num_cached = self.block_size, len(cached[0]) if cached else 0
        computed = max(num_cached * size, request.num_computed_tokens)
        tables, num_passed = request.block_tables, request.num_passed
        if not tables:
            tables = [[] for _ in self.groups]
            num_passed = [group.first_needed(computed) // size for group in self.groups]
        held: list[Sequence[int]] = [()] * len(self.groups)
        if cached:
            held = [block_ids[first:] for block_ids, first in zip(cached, num_passed, strict=True)]
        counts: list[int] = []
        wanted: dict[int, list[bool]] = {}
        for g, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            first = len(table) + num_cached
            if group.is_state:
                wanted[g] = self._states.wanted(request, g, first, computed, step_end, num_spare)
                counts.append(sum(wanted[g]))
                continue
            end = min(num_tokens, computed + self.max_chunk) if group.window else num_tokens
            counts.append(max(-(-end // size) - first, 0))
        return _Growth(tables, num_passed, held, counts, wanted)

    def give_back_passed(self, request: Request) -> None:
        """Release the blocks before the window of every later query, and states that are passed.

        The next query may be the one of the newest token that the CPU knows: that is how far a retraction goes back.
        """
        position = min(request.num_computed_tokens, len(request.token_ids) - 1)
        for g, group in self._passing:
            first = min(group.first_needed(position) // self.block_size, len(request.block_tables[g]))
            if group.is_state:
                self._states.pass_by(request, g, first, self._prefixes.hash)
            else:
                self.pools.release(g, request.block_tables[g][request.num_passed[g] : first])
            request.num_passed[g] = max(request.num_passed[g], first)
        self._plan_return(request)

    def _plan_return(self, request: Request) -> None:
        """Note at how many known tokens the newest state of the request is the only one that it reads."""
        newest = {g: len(request.block_tables[g]) - 1 for g in self._states.groups}
        waits = any(request.num_passed[g] < index for g, index in newest.items())
        request.next_return = max(newest.values()) * self.block_size + 2 if waits else sys.maxsize

    def commit(self, request: Request) -> None:
        """Publish the request's full blocks whose tokens are both known and computed."""
        ready, size = min(len(request.token_ids), request.num_computed_tokens), self.block_size
        for end in range(request.next_commit, ready + 1, size):
            index = end // size - 1
            block_hash = self._prefixes.hash(request, index)
            for g, table in enumerate(request.block_tables):
                if index < request.num_passed[g] or table[index] == UNHELD:
                    continue
                if self.groups[g].is_state:
                    self._states.publish(g, block_hash, table[index])
                else:
                    self.pools.of_group[g].publish(g, block_hash, table[index])
            self._prefixes.history.published(request, index)
            request.next_commit = end + size

    def unpublish(self, request: Request) -> None:
        """Remove the blocks that the request computed from the prefix cache: their content may be corrupt.

        The blocks that it found in the cache stay there if it has sampled a token since it was admitted: the logits
        were finite, so what they were computed from was sound. Otherwise one of these blocks may be the cause.
        """
        has_sampled = len(request.token_ids) > request.num_admitted_tokens
        num_sound = request.num_cached_blocks if has_sampled else 0
        for g, (table, num_passed) in enumerate(zip(request.block_tables, request.num_passed, strict=True)):
            self.pools.unpublish(g, table[max(num_passed, num_sound) :])
            if self.groups[g].is_state:  # passed ones may be found, too
                find = self.pools.finder(g)
                passed = (find(self._prefixes.hash(request, index)) for index in range(num_sound, num_passed))
                self.pools.unpublish(g, [block_id for block_id in passed if block_id is not None])
            if self.tier is not None:
                self.tier.forget(g, request.block_hashes[num_sound:])

    def release(self, request: Request) -> None:
        """Release the request's blocks, the last one first, so that the start of a prefix is evicted last."""
        for g, (table, num_passed) in enumerate(zip(request.block_tables, request.num_passed, strict=True)):
            self.pools.release(g, reversed(table[num_passed:]))
        request.block_tables, request.num_passed = [], []
        request.num_slots = 0
        request.next_commit = request.next_return = sys.maxsize

    def reset(self) -> bool:
        """Empty the prefix cache. Returns False, without any change, while a request or a load holds a block."""
        was_reset = self.pools.reset()
        if was_reset:
            self._prefixes.history.clear()
            if self.tier is not None:
                self.tier.clear()
        return was_reset

    def check(self, holders: Iterable[Request]) -> None:
        """Assert all invariants, given all requests that hold blocks."""
        requests = list(holders)
        tables = [[each.block_tables[g][each.num_passed[g] :] for each in requests] for g in range(len(self.groups))]
        if self.tier is not None:
            self.tier.check()
            tables = [of_requests + self.tier.held(g) for g, of_requests in enumerate(tables)]
        held = self.pools.check(tables)
        for request in requests:
            num_computed = request.num_computed_tokens
            assert request.num_slots == min(map(len, request.block_tables)) * self.block_size
            assert num_computed <= request.num_slots, "computed tokens without a slot"
            num_ready = min(len(request.token_ids), num_computed)
            next_full = num_ready - num_ready % self.block_size + self.block_size
            assert request.next_commit == (next_full if self.enable_prefix_caching else sys.maxsize), "commit is late"
            for g in range(len(self.groups)):
                self._check_table(request, g, held[g])

    def _check_table(self, request: Request, g: int, held: Counter[int]) -> None:
        num_passed, size, pool = request.num_passed[g], self.block_size, self.pools.of_group[g]
        block_ids = request.block_tables[g][num_passed:]
        assert len(set(held_ids(block_ids))) == len(held_ids(block_ids)), "a block twice in one table"
        needed = self.groups[g].first_needed(min(request.num_computed_tokens, len(request.token_ids) - 1))
        assert num_passed * size <= needed, "a block that is still read was given back"
        for index, block_id in enumerate(block_ids, num_passed):
            if block_id == UNHELD:
                continue
            name = pool.name_of(block_id)
            if index >= request.num_computed_tokens // size:
                assert held[block_id] == 1, "a block yet to be written is shared"
                assert name is None, "a block yet to be written is published"
            elif name is None:
                assert held[block_id] == 1 or pool.is_suspect(block_id), "a shared block is not published"
            else:
                assert name == (g, self._prefixes.hash(request, index)), "a published block holds other tokens"
