"""Which part of the past a layer keeps. All that policy knows of the kinds of attention."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same part of the past, and therefore have one block table in common."""

    window: int = 0  # how many tokens a query attends to, its own included; 0: all

    def first_needed(self, position: int) -> int:
        """The position of the first token that the query at `position`, and every later one, may still read."""
        return max(position + 1 - self.window, 0) if self.window else 0


FULL = CacheGroup()


def most_blocks(groups: Iterable[CacheGroup], num_tokens: int, block_size: int, max_chunk: int) -> int:
    """The most blocks, over all groups, that a request of so many tokens holds at a time.

    `max_chunk`: the most tokens of one request that a step computes.
    """
    total = 0
    for group in groups:
        in_all = -(-num_tokens // block_size)
        # The window of a step's first query, one token earlier after a retraction, and the step's chunk.
        passing = (group.window + max_chunk) // block_size + 2 if group.window else in_all
        total += min(in_all, passing)
    return total


def longest_sequence(
    groups: Sequence[CacheGroup], num_blocks: int, block_size: int, max_chunk: int, max_tokens: int
) -> int:
    """The most tokens, up to `max_tokens`, of a request that never needs more than `num_blocks` blocks."""
    return (
        bisect_right(range(max_tokens + 1), num_blocks, key=lambda n: most_blocks(groups, n, block_size, max_chunk)) - 1
    )
