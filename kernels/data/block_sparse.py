"""Block-sparse attention: which blocks of keys a query sees. Needs no Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """The past in blocks: a query sees the newest `local` ones, its own included, and of the others each `stride`-th.

    Which these are depends on the head: block b where (b + (first_head + head) * head_step + 1) is a multiple of
    `stride`.
    """

    block: int  # tokens in a block, 2^n of at least 16; none that the KV cache is made of
    local: int
    stride: int
    head_step: int  # 0: all heads see the same
    first_head: int = 0  # of those that this rank holds

    def seen(self, query_positions: Tensor, key_positions: Tensor, heads: Tensor) -> Tensor:
        """Return which positions [N] are seen from positions [n] by heads [H]: bool [H, n, N]. Causality is left to
        the caller.
        """
        own, key = query_positions.unsqueeze(1) // self.block, key_positions // self.block
        offset = ((self.first_head + heads) * self.head_step + 1).view(-1, 1, 1)
        return (own - key < self.local) | ((key + offset) % self.stride == 0)

    def num_keys(self, position: int) -> int:
        """About how many keys a head sees of the query at `position`."""
        local = max(position // self.block - self.local + 1, 0)
        return position + 1 - local * self.block + local * self.block // self.stride

    def residues(self, group: int) -> int:
        """Return the number of blocks of `stride` consecutive ones that a KV head's `group` query heads see between
        them.
        """
        return min(group, self.stride // math.gcd(self.stride, self.head_step))

    @property
    def constants(self) -> tuple[int, int, int, int, int]:
        """For kernels."""
        return self.block, self.local, self.stride, self.head_step, self.first_head

    def num_tiles(self, length: int, tile: int, group: int) -> int:
        """Tiles of keys that decode reads for a KV head of a context."""
        local = max((length - 1) // self.block - self.local + 1, 0)
        vertical = -(-local // self.stride) * self.residues(group) * (self.block // tile)
        return vertical + -(-length // tile) - local * (self.block // tile)
