"""Remembers past prompts by their hashes, to explain why the prefix cache held no more of a new one. Bounded."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256

from engine.core.request import Request

MAX_CONTINUED = 1 << 16  # hashes, up to twice as many
MAX_STARTS = 1 << 13  # first blocks of prompts


class RecentHashes:
    """A set of the newest `most` hashes, up to twice as many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._newest: set[bytes] = set()
        self._older: set[bytes] = set()

    def add(self, name: bytes) -> None:
        self._newest.add(name)
        if len(self._newest) > self._most:
            self._newest, self._older = set(), self._newest

    def __contains__(self, name: bytes) -> bool:
        return name in self._newest or name in self._older

    def clear(self) -> None:
        self._newest, self._older = set(), set()


class PrefixHistory:
    """After which prefixes a block was published, and with which salt a tenant last sent the same start.

    A salt keeps what others sent secret. So a prompt is only compared with those of the same salt or the same tenant.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._continued = RecentHashes(MAX_CONTINUED)
        self._salts: OrderedDict[int, int] = OrderedDict()  # hash of tenant and first block → that of salt and adapter

    def published(self, request: Request, index: int) -> None:
        """Record that a block of the request, whose hashes up to it are known, was published."""
        self._continued.add(_parent(request, index))

    def went_on(self, request: Request, num_blocks: int) -> bool:
        """Return whether another block was published after the request's first `num_blocks` blocks."""
        return _parent(request, num_blocks) in self._continued

    def record_salt(self, request: Request) -> bool:
        """Record the start of a new request. Returns whether its tenant last sent the same first block with another
        salt. Of requests without a tenant nothing is recorded.
        """
        size, sent = self._block_size, request.engine_request
        if not sent.tenant or request.num_prompt_tokens < size:
            return False
        start, salt = hash((sent.tenant, *request.name_ids(0, size))), hash(sent.cache_scope)
        last = self._salts.pop(start, salt)
        self._salts[start] = salt
        if len(self._salts) > MAX_STARTS:
            self._salts.popitem(last=False)
        return last != salt

    def clear(self) -> None:
        self._continued.clear()
        self._salts.clear()


def salt_hash(request: Request) -> bytes:
    """Return the hash that precedes the request's first block."""
    sent = request.engine_request
    salted = sha256(sent.cache_salt.encode()).digest()
    if sent.adapter is None:
        return salted
    # A byte that no salt contains, as UTF-8 has none such: a salt cannot be chosen to lead to an adapter's blocks.
    return sha256(salted + bytes.fromhex(sent.adapter.version) + b"\xff").digest()


def _parent(request: Request, index: int) -> bytes:
    return request.block_hashes[index - 1] if index else salt_hash(request)
