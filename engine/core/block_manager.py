"""Who owns which physical KV block, and what cached blocks hold. Knows no queue, no step, no memory: blocks are ids.

A block's life: free and empty → held (by one request, which fills it) → published (full, its content findable by hash;
held by any number of requests) → free but still published, until its turn to be evicted comes → held again.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from struct import Struct

from engine.core.request import Request

NO_BLOCKS: list[int] = []  # shared by all who got none; nobody changes it


class BlockManager:
    """Physical blocks `0 .. num_blocks-1` of `block_size` token slots each.

    Prefix cache. A full block is named by `sha256(name of the block before it, its token ids)`, the chain starting at
    `sha256(salt)`; so a name stands for a whole prefix, equal prefixes have equal names whoever computed them, and a
    chain survives the eviction and recomputation of a block in its middle. A 256-bit cryptographic hash makes a hit
    proof of equal content: nobody can construct two prefixes with one name, which Python's `hash()` of token tuples
    would allow, and a name costs 32 bytes where the tokens to compare would cost a kilobyte.

    Two requests that compute the same content at once both keep their own block; the first one is published, the
    other's block stays private and is empty when released.

    Writes need no locks and no waiting. Steps run on the device in launch order, and a step stores the KV of all its
    tokens before any of them attends (layer by layer); so
    - a block released while a launched step still writes to it may be handed out at once: its new owner's writes are
      launched later,
    - a block may be published, and hit by another request, in the very step that fills it.
    A stale write never meets foreign content: a request writes only to blocks that it alone holds and that are not
    published, and a block it loses can be written by another, or published again, only by a later step.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        assert num_blocks >= 1
        assert block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # first: next to be handed out
        self._num_holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks  # of published blocks
        self._published: dict[bytes, int] = {}
        self._pack = Struct(f"<{block_size}q").pack

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds: empty or evictable."""
        return len(self._free)

    def match_prefix(self, request: Request) -> list[int]:
        """The published blocks that hold the longest prefix of its tokens, the last token excepted: one is computed."""
        block_ids: list[int] = []
        if self.enable_prefix_caching:
            for index in range((len(request.token_ids) - 1) // self.block_size):
                block_id = self._published.get(self._hash(request, index))
                if block_id is None:
                    break
                block_ids.append(block_id)
        return block_ids

    def grow(
        self, request: Request, num_tokens: int, cached_ids: Sequence[int] = (), num_spare: int = 0
    ) -> list[int] | None:
        """Append blocks to its table until `num_tokens` tokens fit: `cached_ids` (of `match_prefix`), then new ones.

        Returns the new ones. All or nothing: None, and no change, unless `num_spare` blocks are still free afterwards.
        """
        num_new = -(-num_tokens // self.block_size) - len(request.block_ids) - len(cached_ids)
        revived = [block_id for block_id in cached_ids if not self._num_holders[block_id]] if cached_ids else ()
        if num_new + num_spare > len(self._free) - len(revived):
            return None
        for block_id in revived:
            del self._free[block_id]
        for block_id in cached_ids:
            self._num_holders[block_id] += 1
        new_ids = [self._take() for _ in range(num_new)] if num_new > 0 else NO_BLOCKS
        if not request.block_ids and self.enable_prefix_caching:
            request.next_commit = (len(cached_ids) + 1) * self.block_size
        request.block_ids += cached_ids
        request.block_ids += new_ids
        request.num_slots = len(request.block_ids) * self.block_size
        return new_ids

    def commit(self, request: Request) -> None:
        """Publish its blocks that are full of tokens which are both known and computed."""
        ready, size = min(len(request.token_ids), request.num_computed_tokens), self.block_size
        for end in range(request.next_commit, ready + 1, size):
            index = end // size - 1
            block_hash, block_id = self._hash(request, index), request.block_ids[index]
            if self._published.setdefault(block_hash, block_id) == block_id:
                self._hashes[block_id] = block_hash
            request.next_commit = end + size

    def release(self, request: Request) -> None:
        """Take its blocks back, the last one first: the head of a prefix, shared most, is evicted last."""
        for block_id in reversed(request.block_ids):
            self._num_holders[block_id] -= 1
            if not self._num_holders[block_id]:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
        request.block_ids = []
        request.num_slots = 0
        request.next_commit = sys.maxsize

    def reset(self) -> bool:
        """Forget all cached content. False, and no change, while a request holds a block."""
        if len(self._free) < self.num_blocks:
            return False
        self._hashes = [None] * self.num_blocks
        self._published.clear()
        return True

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._published[block_hash]
            self._hashes[block_id] = None
        self._num_holders[block_id] = 1
        return block_id

    def _hash(self, request: Request, index: int) -> bytes:
        """The name of its full block `index`; computed once, even over preemptions."""
        hashes, size = request.block_hashes, self.block_size
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else sha256(request.engine_request.cache_salt.encode()).digest()
            start = len(hashes) * size
            hashes.append(sha256(parent + self._pack(*request.token_ids[start : start + size])).digest())
        return hashes[index]

    def check(self, holders: Iterable[Request]) -> None:
        """Assert every invariant, given all requests that hold blocks."""
        assert not NO_BLOCKS
        requests = list(holders)
        held = Counter(block_id for request in requests for block_id in request.block_ids)
        assert self._num_holders == [held[block_id] for block_id in range(self.num_blocks)], "holders are miscounted"
        assert set(self._free) == set(range(self.num_blocks)) - set(held), "a block is lost, or both free and held"
        names = {block_hash: block_id for block_id, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert self._published == names, "names and blocks disagree"
        empty_first = [self._hashes[block_id] is not None for block_id in self._free]
        assert empty_first == sorted(empty_first), "an empty free block waits behind a cached one"
        for request in requests:
            block_ids, num_computed = request.block_ids, request.num_computed_tokens
            assert len(set(block_ids)) == len(block_ids), "a block twice in one table"
            assert request.num_slots == len(block_ids) * self.block_size
            assert num_computed <= request.num_slots, "computed tokens without a slot"
            num_ready = min(len(request.token_ids), num_computed)
            next_full = num_ready - num_ready % self.block_size + self.block_size
            assert request.next_commit == (next_full if self.enable_prefix_caching else sys.maxsize), "commit is late"
            for block_id in block_ids[num_computed // self.block_size :]:
                assert held[block_id] == 1, "a block yet to be written is shared"
                assert self._hashes[block_id] is None, "a block yet to be written is published"
            for index, block_id in enumerate(block_ids):
                if self._hashes[block_id] is None:
                    assert held[block_id] == 1, "a shared block is not published"
                else:
                    assert self._hashes[block_id] == self._hash(request, index), "a published block holds other tokens"
