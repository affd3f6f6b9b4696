"""Groups of layers that cache the same tokens. This is all that the scheduler knows about kinds of attention."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that cache the same tokens and therefore share a block table."""

    window: int = 0  # number of tokens that a query attends to, including its own; 0: all
    pool: int = 0  # groups whose blocks have the same size in bytes share a pool

    def first_needed(self, position: int) -> int:
        """Return the position of the first token that the query at `position` or any later query reads."""
        return max(position + 1 - self.window, 0) if self.window else 0


FULL = CacheGroup()


def most_blocks(groups: Sequence[CacheGroup], num_tokens: int, block_size: int, max_chunk: int) -> list[int]:
    """Return the maximum number of blocks of each pool that a request of `num_tokens` tokens holds at a time.

    `max_chunk`: maximum number of tokens that a step computes for one request.
    """
    most = [0] * (1 + max(group.pool for group in groups))
    for group in groups:
        in_all = -(-num_tokens // block_size)
        # The window of the step's first query, which a retraction moves back by one token, and the step's chunk.
        passing = (group.window + max_chunk) // block_size + 2 if group.window else in_all
        most[group.pool] += min(in_all, passing)
    return most


def longest_sequence(
    groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int, max_chunk: int, max_tokens: int
) -> int:
    """Return the length, up to `max_tokens`, of the longest request that never holds more than `num_blocks` of each
    pool.
    """

    def is_too_long(num_tokens: int) -> bool:
        most = most_blocks(groups, num_tokens, block_size, max_chunk)
        return any(needed > given for needed, given in zip(most, num_blocks, strict=True))

    return bisect_left(range(max_tokens + 1), True, key=is_too_long) - 1
