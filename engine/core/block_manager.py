"""Which KV blocks a request holds in each cache group, and which of them it finds already computed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from struct import pack

from engine.core.block_pool import BlockPool
from engine.core.cache_groups import FULL, CacheGroup, longest_sequence, most_blocks
from engine.core.request import Request

HASHED_AT_ONCE = 256  # blocks: a long prompt is hashed in parts, each before it is needed
UNHELD = 0  # in a block table, where the request holds no block: no query reads or writes that entry


class BlockManager:
    """Block tables of `block_size` tokens a block, one for each cache group, over one pool of `num_blocks` blocks.

    Entry i of a table is the block of tokens `i * block_size ..`. A group with a window gives blocks back once no query
    to come reads them; their entries stay in the table, below `Request.num_passed`. All blocks have the same size in
    bytes, so whatever one group gives back any other can take: the pool needs no division between groups.

    Prefix cache. A full block is named by its group and `sha256(hash of the block before it, its token ids)`, the chain
    starting at `sha256(salt)`. So a name stands for a whole prefix, equal prefixes have equal names, and a chain survives
    the eviction and recomputation of a block in its middle. With a 256-bit cryptographic hash a hit is proof of equal
    content: no two prefixes with one name can be constructed, which Python's `hash()` of token tuples would allow; and a
    name costs 32 bytes where the tokens to compare would cost a kilobyte.

    Two requests that compute the same content at once both keep their own block; the first one is published, the
    other's block stays private and is empty when released.

    Writes need no locks and no waiting. Steps run on the device in launch order, and a step stores the KV of all its
    tokens before any of them attends (layer by layer); so
    - a block released while a launched step still reads or writes it may be handed out at once: its new owner's writes are
      launched later,
    - a block may be published, and hit by another request, in the very step that fills it.
    A stale write never meets foreign content: a request writes only to blocks that it alone holds and that are not
    published, and a block it loses can be written by another, or published again, only by a later step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: Sequence[CacheGroup] = (FULL,),
        max_chunk: int = sys.maxsize,
    ) -> None:
        """`max_chunk`: the most tokens of one request that a step computes."""
        assert block_size >= 1
        assert groups
        self.groups = tuple(groups)
        self.pool = BlockPool(num_blocks, len(self.groups))
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching, self.max_chunk = enable_prefix_caching, max_chunk
        self._windowed = [(index, group) for index, group in enumerate(self.groups) if group.window]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds: empty or evictable."""
        return self.pool.num_free

    def most_held(self, num_tokens: int) -> int:
        """The most blocks that a request of so many tokens holds at a time."""
        return most_blocks(self.groups, num_tokens, self.block_size, self.max_chunk)

    def longest(self, max_tokens: int) -> int:
        """The most tokens, up to `max_tokens`, of a request that can run, at least alone."""
        return longest_sequence(self.groups, self.num_blocks, self.block_size, self.max_chunk, max_tokens)

    def capacity(self, num_tokens: int) -> int:
        """The tokens that fit the cache in sequences of `num_tokens`, rounded up to whole blocks."""
        num_tokens = -(-num_tokens // self.block_size) * self.block_size
        return self.num_blocks * num_tokens // self.most_held(num_tokens)

    def match_prefix(self, request: Request) -> list[list[int]]:
        """For each group, the first entries of a block table: the longest prefix that is cached.

        The last token is excepted: one is computed. A group with a window needs only what the next query reads of it.
        """
        tables: list[list[int]] = [[] for _ in self.groups]
        if not self.enable_prefix_caching:
            return tables
        size = self.block_size
        num_blocks = (len(request.token_ids) - 1) // size
        for g, group in enumerate(self.groups):
            if not group.window:
                find = self.pool.finder(g)
                for index in range(num_blocks):
                    if (block_id := find(self._hash(request, index))) is None:
                        break
                    tables[g].append(block_id)
                num_blocks = len(tables[g])
        if self._windowed:
            num_blocks = self._match_windows(request, num_blocks, tables)
        for table in tables:
            del table[num_blocks:]
        return tables

    def miss_reason(self, request: Request, num_matched: int) -> str:
        """Why `match_prefix` found no more than the first `num_matched` blocks; empty: it found all that it may.

        "disabled": there is no prefix cache; "not_read": each token of the prompt has a result of its own; "evicted";
        "not_seen": no request with this salt has computed these tokens, or it was long ago.
        """
        if not self.enable_prefix_caching:
            return "disabled"
        if not request.reads_cache:
            return "not_read"
        if num_matched >= (request.num_prompt_tokens - 1) // self.block_size:
            return ""
        return "evicted" if self.pool.was_cached(self._hash(request, num_matched)) else "not_seen"

    def _match_windows(self, request: Request, num_blocks: int, tables: list[list[int]]) -> int:
        """Of the prefixes of up to `num_blocks` blocks, the longest whose end every window finds published; in blocks.

        Fills the tables of groups with a window, but for entries that the query after that prefix does not read.
        """
        size, longest = self.block_size, 0
        finders = [(self.pool.finder(g), group, tables[g]) for g, group in self._windowed]
        runs = [0] * len(finders)  # published blocks in succession, up to the one at hand
        for index in range(num_blocks):
            block_hash, is_end = self._hash(request, index), True
            for i, (find, group, table) in enumerate(finders):
                block_id = find(block_hash)
                runs[i] = 0 if block_id is None else runs[i] + 1
                table.append(UNHELD if block_id is None else block_id)
                is_end &= runs[i] > index - group.first_needed((index + 1) * size) // size
            if is_end:
                longest = index + 1
        for _, group, table in finders:
            num_passed = group.first_needed(longest * size) // size
            table[:num_passed] = [UNHELD] * num_passed
        return longest

    def grow(
        self, request: Request, num_tokens: int, cached: Sequence[Sequence[int]] = (), num_spare: int = 0
    ) -> list[list[int]] | None:
        """Append blocks to its tables until `num_tokens` tokens fit: `cached` (of `match_prefix`), then new ones.

        A group with a window gives back what no query to come reads, and gets blocks for no more than a step computes.
        Returns the new blocks of each group. All or nothing: None unless `num_spare` blocks are still free afterwards.
        """
        size, pool = self.block_size, self.pool
        if request.block_tables and self._windowed:
            self._give_back_passed(request)
        tables, num_passed, held, counts = self._growth(request, num_tokens, cached)
        if sum(counts) + num_spare > pool.num_free - pool.num_unheld(held):
            return None
        num_cached = len(cached[0]) if cached else 0
        pool.hold(held)
        new_ids = [pool.take(count) for count in counts]
        if not request.block_tables and self.enable_prefix_caching:
            request.next_commit = (num_cached + 1) * size
        for g, table in enumerate(tables):
            table += cached[g] if num_cached else ()
            table += new_ids[g]
        request.block_tables, request.num_passed = tables, num_passed
        request.num_slots = min(map(len, tables)) * size
        return new_ids

    def fits(self, request: Request, num_tokens: int, cached: Sequence[Sequence[int]], num_spare: int) -> bool:
        """Whether a request that holds no block would get them from `grow`."""
        *_, held, counts = self._growth(request, num_tokens, cached)
        return sum(counts) + num_spare <= self.pool.num_free - self.pool.num_unheld(held)

    def _growth(
        self, request: Request, num_tokens: int, cached: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[int], list[int], list[int]]:
        """For `grow`: the tables and how many of their entries are passed, the cached blocks that it has to hold, and how many
        new ones each group needs.
        """
        size, num_cached = self.block_size, len(cached[0]) if cached else 0
        computed = max(num_cached * size, request.num_computed_tokens)
        tables, num_passed = request.block_tables, request.num_passed
        if not tables:
            tables = [[] for _ in self.groups]
            num_passed = [group.first_needed(computed) // size for group in self.groups]
        held = (
            [block_id for ids, first in zip(cached, num_passed, strict=True) for block_id in ids[first:]]
            if cached
            else []
        )
        counts = []
        for group, table in zip(self.groups, tables, strict=True):
            end = min(num_tokens, computed + self.max_chunk) if group.window else num_tokens
            counts.append(max(-(-end // size) - len(table) - num_cached, 0))
        return tables, num_passed, held, counts

    def _give_back_passed(self, request: Request) -> None:
        """Release the blocks that lie before the window of every query to come.

        A retraction takes the next query back to the newest token that the CPU knows, and no further.
        """
        position = min(request.num_computed_tokens, len(request.token_ids) - 1)
        for g, group in self._windowed:
            first = min(group.first_needed(position) // self.block_size, len(request.block_tables[g]))
            self.pool.release(request.block_tables[g][request.num_passed[g] : first])
            request.num_passed[g] = max(request.num_passed[g], first)

    def commit(self, request: Request) -> None:
        """Publish its blocks that are full of tokens which are both known and computed."""
        ready, size = min(len(request.token_ids), request.num_computed_tokens), self.block_size
        for end in range(request.next_commit, ready + 1, size):
            index = end // size - 1
            block_hash = self._hash(request, index)
            for g, table in enumerate(request.block_tables):
                if index >= request.num_passed[g]:
                    self.pool.publish(g, block_hash, table[index])
            request.next_commit = end + size

    def unpublish(self, request: Request) -> None:
        """Let no request find its blocks any more: their content is in doubt."""
        for table, num_passed in zip(request.block_tables, request.num_passed, strict=True):
            self.pool.unpublish(table[num_passed:])

    def release(self, request: Request) -> None:
        """Take its blocks back, the last one first: the head of a prefix, shared most, is evicted last."""
        for table, num_passed in zip(request.block_tables, request.num_passed, strict=True):
            self.pool.release(reversed(table[num_passed:]))
        request.block_tables, request.num_passed = [], []
        request.num_slots = 0
        request.next_commit = sys.maxsize

    def reset(self) -> bool:
        """Forget all cached content. False, and no change, while a request holds a block."""
        return self.pool.reset()

    def _hash(self, request: Request, index: int) -> bytes:
        """Names its first `index + 1` blocks, all full; computed once, even over preemptions."""
        hashes = request.block_hashes
        if index >= len(hashes):
            self._hash_more(request, index + 1)
        return hashes[index]

    def _hash_more(self, request: Request, count: int) -> None:
        """Hash its next full blocks, at least up to `count` in all, and some more where their tokens are known."""
        hashes, size = request.block_hashes, self.block_size
        start = len(hashes)
        end = min(max(count, start + HASHED_AT_ONCE), len(request.token_ids) // size)
        data, width = pack(f"<{(end - start) * size}q", *request.token_ids[start * size : end * size]), 8 * size
        name = hashes[-1] if hashes else sha256(request.engine_request.cache_salt.encode()).digest()
        for at in range(0, len(data), width):
            name = sha256(name + data[at : at + width]).digest()
            hashes.append(name)

    def check(self, holders: Iterable[Request]) -> None:
        """Assert every invariant, given all requests that hold blocks."""
        requests = list(holders)
        held = Counter(
            block_id
            for request in requests
            for table, num_passed in zip(request.block_tables, request.num_passed, strict=True)
            for block_id in table[num_passed:]
        )
        self.pool.check(held)
        for request in requests:
            num_computed = request.num_computed_tokens
            assert request.num_slots == min(map(len, request.block_tables)) * self.block_size
            assert num_computed <= request.num_slots, "computed tokens without a slot"
            num_ready = min(len(request.token_ids), num_computed)
            next_full = num_ready - num_ready % self.block_size + self.block_size
            assert request.next_commit == (next_full if self.enable_prefix_caching else sys.maxsize), "commit is late"
            for g in range(len(self.groups)):
                self._check_table(request, g, held)

    def _check_table(self, request: Request, g: int, held: Counter[int]) -> None:
        num_passed, size = request.num_passed[g], self.block_size
        block_ids = request.block_tables[g][num_passed:]
        assert len(set(block_ids)) == len(block_ids), "a block twice in one table"
        needed = self.groups[g].first_needed(min(request.num_computed_tokens, len(request.token_ids) - 1))
        assert num_passed * size <= needed, "a block that is still read was given back"
        for index, block_id in enumerate(block_ids, num_passed):
            name = self.pool.name_of(block_id)
            if index >= request.num_computed_tokens // size:
                assert held[block_id] == 1, "a block yet to be written is shared"
                assert name is None, "a block yet to be written is published"
            elif name is None:
                assert held[block_id] == 1, "a shared block is not published"
            else:
                assert name == (g, self._hash(request, index)), "a published block holds other tokens"
