"""Memory for the keys and values of a drafter's layers, in the target's KV blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.kv.cache_groups import CacheGroup
from engine.models.drafters.spec import DraftSpec
from engine.worker.device import Device


@dataclass(frozen=True, slots=True)
class DraftCache:
    """Keys and values, or latents, of a drafter's layers for the tokens of each KV block.

    A block of the target's cache group `group`, whose layers attend to all tokens, has a part for the drafter beside
    it, under the same block id. So the drafter uses that group's block tables, and a cached prefix has both parts.
    (The entry of a block's last token may depend on the token after it, which may be another one in a later request.
    Drafts may be worse then.) Blocks of other groups have such parts, too, which nothing uses.
    """

    entries: tuple[tuple[int, int, int], ...]  # a token's entry in each layer: parts, heads, channels
    sources: tuple[int | None, ...]  # for each layer, an earlier one whose entries it reads; None: it has its own
    group: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: DraftSpec, groups: Sequence[CacheGroup], block_size: int, dtype: torch.dtype) -> DraftCache:
        """`spec`: of one rank's part. `groups`: of the target; at least one has no window, see `full_group`."""
        entries, sources = tuple(m.cached for m in spec.mixers), tuple(m.kv_of for m in spec.mixers)
        group = full_group(groups)
        assert group is not None
        return cls(entries, sources, group, block_size, dtype)

    @property
    def block_bytes(self) -> int:
        own = (entry for entry, source in zip(self.entries, self.sources, strict=True) if source is None)
        return sum(map(math.prod, own)) * self.block_size * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: Device) -> list[Tensor]:
        """Allocate [parts, num_blocks, heads, block_size, channels] of zeros for each layer."""
        found: list[Tensor] = []
        for (parts, heads, channels), source in zip(self.entries, self.sources, strict=True):
            shape = parts, num_blocks, heads, self.block_size, channels
            found.append(device.zeros(*shape, dtype=self.dtype) if source is None else found[source])
        return found


def full_group(groups: Sequence[CacheGroup]) -> int | None:
    """Return the first group whose layers attend to all tokens; None: there is none."""
    return next((index for index, group in enumerate(groups) if not group.passes), None)
