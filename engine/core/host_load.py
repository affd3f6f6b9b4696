"""A load: blocks of a prefix on their way from host memory, or from a file, to the device."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class HostLoad:
    """Blocks to load, in the same order in each list. See `HostTier`."""

    number: int = 0
    names: list[tuple[int, bytes]] = field(default_factory=list)  # cache group, and the hash of the prefix
    slots: list[int | None] = field(default_factory=list)  # in host memory; None: the block is in a file
    block_ids: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)  # of each group: these blocks and the prefix's others, held
    num_ways: int = 0  # of host memory and files: from how many of them blocks are still to come
    failed: set[tuple[int, bytes]] = field(default_factory=set)  # names of blocks that a file does not have after all
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class FileLoad:
    """The part of a load that comes from one file."""

    number: int
    blocks: list[tuple[int, tuple[int, bytes], int]]  # slot in the file, name, block on the device


NOTHING_TO_LOAD = HostLoad(is_done=True)
