"""A load: blocks of a prefix on their way from host memory to the device."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class HostLoad:
    """Blocks to load, in the same order in each list. See `HostTier`."""

    number: int = 0
    names: list[tuple[int, bytes]] = field(default_factory=list)  # cache group, and the hash of the prefix
    slots: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)  # of each group: these blocks and the prefix's others, held
    is_done: bool = False


NOTHING_TO_LOAD = HostLoad(is_done=True)
