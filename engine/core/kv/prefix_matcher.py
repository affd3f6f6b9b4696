"""Finds the longest prefix of a request that the prefix cache holds, and explains why it holds no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from struct import pack

from engine.core.kv.block_pools import UNHELD, BlockPools
from engine.core.kv.cache_groups import CacheGroup
from engine.core.kv.prefix_history import PrefixHistory, salt_hash
from engine.core.kv.state_blocks import StateBlocks
from engine.core.request import Request
from engine.core.tiers import HostTier

HASHED_AT_ONCE = 256  # blocks: a long prompt is hashed in parts, each just before it is needed


class PrefixMatcher:
    """Names blocks by their content, and finds them in the prefix cache.

    The name of a full block is its group and `sha256(hash of the previous block, its name ids)`; the chain starts at
    `sha256(salt)`, or with a LoRA adapter at a hash of that and the adapter's version; once weights were replaced, at a
    hash of that and their version. Name ids are the token ids, except for placeholders (`Request.name_ids`). So a name
    stands for a whole prefix, equal prefixes have equal names, and a chain survives the eviction and recomputation of a
    block in its middle. SHA-256 makes a hit proof of equal content: no one can construct two prefixes with the same
    name, as would be possible with Python's `hash()` of token tuples. A name takes 32 bytes; the tokens to compare
    would take a kilobyte.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pools: BlockPools,
        states: StateBlocks,
        tier: HostTier | None,
        block_size: int,
        caches: bool,
    ) -> None:
        """`caches`: there is a prefix cache."""
        self._caches = caches
        self.weights_version = 0  # how often weights were replaced
        self.history = PrefixHistory(block_size)
        self._groups, self._pools, self._states, self._tier, self._size = groups, pools, states, tier, block_size
        self._passing = [(index, group) for index, group in enumerate(groups) if group.passes]

    def match(self, request: Request, with_new: bool = False, in_host: bool = False) -> list[list[int]]:
        """Find the longest cached prefix. Returns the first block table entries of each group.

        The prefix never includes the last token, since at least one token must be computed. In a group with a window or
        states, only the blocks that the next query reads need to be cached. `with_new`: as if the states that the
        planned step computes were there. `in_host`: blocks in host memory, too, as `IN_HOST`.
        """
        tables: list[list[int]] = [[] for _ in self._groups]
        if not self._caches:
            return tables
        size = self._size
        num_blocks = (len(request.token_ids) - 1) // size
        for g, group in enumerate(self._groups):
            if not group.passes:
                find = self._finder(g, with_new, in_host)
                for index in range(num_blocks):
                    if (block_id := find(self.hash(request, index))) is None:
                        break
                    tables[g].append(block_id)
                num_blocks = len(tables[g])
        if self._passing:
            num_attended, num_blocks = num_blocks, self._match_passing(request, num_blocks, tables, with_new, in_host)
            if self._states.groups and not (with_new or in_host):
                request.branch = num_attended - 1 if num_attended > num_blocks else -1
        for table in tables:
            del table[num_blocks:]
        return tables

    def awaits_state(self, request: Request, num_matched: int) -> bool:
        """Return whether the planned step computes a state from which more than `num_matched` blocks of the request's
        prefix would be found in the next step.
        """
        return self._states.has_new and len(self.match(request, with_new=True)[0]) > num_matched

    def explain_miss(self, request: Request, num_matched: int) -> tuple[str, int]:
        """Return why `match` found only the first `num_matched` blocks of a new request, or "" if it found the
        whole prompt; and how many tokens of the prompt the cache holds or held: there the prompt parted from what it
        knew. Call it once per request.

        "disabled": there is no prefix cache; "not_read": every token of the prompt must be computed for its own result;
        "evicted"; "no_state": KV blocks were found, but no state of recurrent layers; "other_salt": the tenant last
        sent this start with another salt; "other_tokens": requests with this salt went on differently; "not_seen": none
        went on, or one did long ago.
        """
        size, num_known = self._size, num_matched
        if not self._caches:
            return "disabled", 0
        if not request.reads_cache:
            return "not_read", 0
        has_other_salt = self.history.record_salt(request)
        num_blocks = (request.num_prompt_tokens - 1) // size
        if num_matched >= num_blocks:
            return "", num_matched * size
        while num_known < num_blocks and self._pools.was_cached(self.hash(request, num_known)):
            num_known += 1
        if num_known > num_matched:
            return "no_state" if request.branch >= num_matched else "evicted", num_known * size
        if not num_matched and has_other_salt:
            return "other_salt", 0
        return "other_tokens" if self.history.went_on(request, num_matched) else "not_seen", num_matched * size

    def _match_passing(
        self, request: Request, num_blocks: int, tables: list[list[int]], with_new: bool, in_host: bool
    ) -> int:
        """Return the length, in blocks, of the longest prefix of up to `num_blocks` blocks whose end is published in
        every group with a window or states.

        Fills the tables of these groups, except for entries that the query after that prefix does not read.
        """
        size, longest = self._size, 0
        finders = [(self._finder(g, with_new, in_host), group, tables[g]) for g, group in self._passing]
        runs = [0] * len(finders)  # consecutive published blocks, up to the current one
        for index in range(num_blocks):
            block_hash, is_end = self.hash(request, index), True
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

    def _finder(self, group: int, with_new: bool, in_host: bool) -> Callable[[bytes], int | None]:
        is_state = self._groups[group].is_state
        find = self._states.finder(group, with_new) if is_state else self._pools.finder(group)
        return self._tier.finder(group, find) if in_host and self._tier is not None else find

    def hash(self, request: Request, index: int) -> bytes:
        """Return the hash of the request's first `index + 1` blocks, all full. Kept across preemptions."""
        hashes = request.block_hashes
        if index >= len(hashes):
            self._hash_more(request, index + 1)
        return hashes[index]

    def _hash_more(self, request: Request, count: int) -> None:
        """Hash the next full blocks: up to block `count`, and more of them if their tokens are known."""
        hashes, size = request.block_hashes, self._size
        start = len(hashes)
        end = min(max(count, start + HASHED_AT_ONCE), len(request.token_ids) // size)
        data, width = pack(f"<{(end - start) * size}q", *request.name_ids(start * size, end * size)), 8 * size
        name = hashes[-1] if hashes else self._first_name(request)
        for at in range(0, len(data), width):
            name = sha256(name + data[at : at + width]).digest()
            hashes.append(name)

    def _first_name(self, request: Request) -> bytes:
        """Return the hash that precedes the request's first block."""
        name = salt_hash(request)
        return sha256(name + pack("<q", self.weights_version)).digest() if self.weights_version else name
