"""Groups of layers that cache the same tokens. This is all that the scheduler knows about kinds of attention."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that cache the same tokens and therefore share a block table.

    **States.** Recurrent layers keep a state instead of keys and values. The block of a state group holds the state
    before its first token, and what its tokens so far have changed: the state after any of them follows from the block
    alone, and computing the newest token again writes the same. A step holds only a few of the blocks of its tokens
    (`kept_blocks`); the other entries of the table are holes.
    """

    window: int = 0  # number of tokens that a query attends to, including its own; 0: all
    pool: int = 0  # groups whose blocks have the same size in bytes share a pool
    is_state: bool = False
    max_retracted: int = 1  # newest tokens of a step that may be computed again: one, and as many as it has drafts

    def first_needed(self, position: int) -> int:
        """Return the position of the first token that the query at `position` or any later query reads."""
        if self.is_state:
            return max(position - 1, 0)  # the state after it
        return max(position + 1 - self.window, 0) if self.window else 0

    @property
    def passes(self) -> bool:
        """True if a request releases the group's first blocks while it runs."""
        return self.is_state or self.window > 0


FULL = CacheGroup()
# The most blocks of a state group that a request without drafts holds at a time, in the step that computes its prompt:
# the newest and the one before it, from before the step; the same two after it; the end of its prompt, and where its
# prompt leaves a cached one. A request that decodes holds one or two.
MAX_STATES = 6
SPARE_STATES = 4  # running requests for which one state is left free when another request starts


def kept_blocks(start: int, end: int, block_size: int, caches: bool, max_retracted: int = 1) -> set[int]:
    """Return the indices of the blocks of a state group that a request holds after it has computed the tokens from
    `start` to `end`: those of the newest token and of the tokens before it to which a retraction goes back, and, if
    there is a prefix cache, the last full block, from which the next turn of a conversation continues.
    """
    kept = set(range((end - 1 - max_retracted) // block_size, (end - 1) // block_size + 1))
    if caches:
        kept.add(end // block_size - 1)
    return {index for index in kept if index >= start // block_size}


def most_blocks(groups: Sequence[CacheGroup], num_tokens: int, block_size: int, max_chunk: int) -> list[int]:
    """Return the maximum number of blocks of each pool that a request of `num_tokens` tokens holds at a time.

    `max_chunk`: maximum number of tokens that a step computes for one request.
    """
    most = [0] * (1 + max(group.pool for group in groups))
    for group in groups:
        in_all = -(-num_tokens // block_size)
        if group.is_state:
            most[group.pool] += min(in_all, MAX_STATES - 2 * ((1 - group.max_retracted) // block_size))
            continue
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
