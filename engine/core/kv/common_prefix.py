"""Prefixes that requests of a step have in common. Attention reads each of them once for all of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.core.kv.cache_groups import CacheGroup
from engine.core.request import Request


@dataclass(frozen=True, slots=True)
class CommonPrefixes:
    """A common prefix is that of `min_members` requests or more whose block tables name the same block at `index`."""

    group: int  # of layers that see all tokens
    index: int
    min_members: int

    @classmethod
    def of(
        cls, groups: Sequence[CacheGroup], block_size: int, min_tokens: int, min_members: int
    ) -> CommonPrefixes | None:
        """Return what a prefix of `min_tokens` is for these groups; None if all layers forget tokens."""
        group = next((index for index, group in enumerate(groups) if not group.passes), None)
        return None if group is None else cls(group, (min_tokens - 1) // block_size, min_members)

    def among(self, requests: Iterable[Request]) -> bool:
        """Return whether some of these requests have a prefix in common."""
        tables = [request.block_tables[self.group] for request in requests]
        blocks = [table[self.index] for table in tables if len(table) > self.index]
        if len(blocks) < self.min_members or len(blocks) - len(set(blocks)) < self.min_members - 1:
            return False
        return max(Counter(blocks).values()) >= self.min_members
