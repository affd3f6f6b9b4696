"""One rank's part of the saved prefix cache: the blocks of a pool, copied to a file and back between steps."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from torch import Tensor

import kernels
from engine.models.files import fingerprint
from engine.worker.block_store.block_copier import Copier
from engine.worker.block_store.block_reads import BlockReads, read_entries
from engine.worker.block_store.cache_file import CacheFile, CacheFileError, Entry, Name
from engine.worker.block_store.host_blocks import HostBlocks
from engine.worker.device import Event

_log = logging.getLogger(__name__)

NUM_BUFFERS = 4  # as many threads read at the start; one thread writes
BUFFERS_BYTES = 256 << 20  # of all buffers, unless one is larger


class Found(IntEnum):
    """Result of `BlockFile.load` for a slot. With several ranks, the least of their results counts."""

    INVALID = 0  # the slot does not hold the block
    UNREAD = 1  # the slot has the block's name; its content was not read
    LOADED = 2  # the content is valid, and is in the KV cache


@dataclass(frozen=True, slots=True)
class EndedSave:
    """A block that was written, if it `is_there`."""

    slot: int
    name: Name
    is_there: bool
    host_slot: int | None  # from which it was written; None: from the device


@dataclass(frozen=True, slots=True)
class BlockFileOptions:
    """Options with which every rank opens its file."""

    path: Path  # absolute
    folder: Path  # of the model
    identity: Mapping[str, str]  # the settings that blocks depend on; each rank adds its model's files and its layout
    max_bytes: int  # of each rank's file
    buffer_bytes: int  # copied at a time
    pool: int = 0  # whose blocks the file holds


class Peers(Protocol):
    """The other ranks, which hold parts of the same blocks in files of their own and repeat what rank 0 does."""

    def tell(self, method: str, *arguments: Any) -> None:
        """On rank 0: call this method of the followers' files, between the same two steps. On a follower: no effect."""

    def agree(self, numbers: Sequence[int]) -> Sequence[int]:
        """On rank 0: return the least of all ranks' numbers at each position, once all have answered. On a follower:
        send its numbers to rank 0 and return them. All ranks make these calls in the same order.
        """


class NoPeers:
    """The `Peers` of a single rank."""

    def tell(self, method: str, *arguments: Any) -> None:
        pass

    def agree(self, numbers: Sequence[int]) -> Sequence[int]:
        return numbers


class BlockFile:
    """A file with slots, each for one rank's part of a block. Call `load` first, then `save` and `clear`, then `close`.

    The thread that launches steps calls it; `io` writes. With several ranks, only rank 0's file
    is called, and a block counts as loaded if all ranks have loaded it. When one rank fails to write, all stop saving.
    """

    def __init__(
        self, file: CacheFile, copier: Copier, peers: Peers, io: ThreadPoolExecutor, num_slots: int, max_blocks: int
    ) -> None:
        """Use `open_block_file`. `num_slots`, `max_blocks`: the least of all ranks' files and copiers."""
        self.path, self.num_slots, self.max_blocks = file.path, num_slots, max_blocks
        self.block_bytes = copier.block_bytes
        self.has_failed = False  # nothing can be saved, until `retry`
        self._has_warned = False  # since something was saved
        self.reads = BlockReads(file, copier)  # on demand, by a single rank
        self._host: HostBlocks | None = None
        self._pool = 0  # whose blocks there
        self._is_single = isinstance(peers, NoPeers)
        self._ended: deque[EndedSave] = deque()
        self._file, self._copier, self._peers = file, copier, peers
        self._io = io
        self._buffers: SimpleQueue[Tensor] = SimpleQueue()
        self._num_buffers = max(min(BUFFERS_BYTES // max(max_blocks * copier.block_bytes, 1), NUM_BUFFERS), 1)
        for _ in range(self._num_buffers):
            self._buffers.put(copier.new_buffer())

    def entries(self) -> list[Entry]:
        """Return the entries of this rank's slots, which may be invalid, the hottest first; each name once."""
        return [entry for entry in self._file.entries() if entry.slot < self.num_slots]

    def load(self, slots: Sequence[tuple[int, Name]], block_ids: Sequence[int], seconds: float) -> Sequence[int]:
        """Fill each block from the slot at its position, for at most `seconds`. `slots`: number, and name of the block
        expected there. Return a `Found` for each slot; slots beyond the blocks are not read.
        """
        self._peers.tell("load", slots, block_ids, seconds)
        deadline = time.monotonic() + seconds
        entries = [self._file.entry(slot) for slot, _ in slots]
        found = [
            Found.UNREAD if entry is not None and entry.name == name else Found.INVALID
            for entry, (_, name) in zip(entries, slots, strict=True)
        ]
        pending: deque[tuple[list[int], Future[list[bool]], Tensor]] = deque()

        def take() -> None:
            part, reading, buffer = pending.popleft()
            for index, is_valid in zip(part, reading.result(), strict=True):
                found[index] = Found.LOADED if is_valid else Found.INVALID
            if ids := [block_ids[index] for index in part if found[index]]:
                self._copier.write(buffer, ids).synchronize()
            self._buffers.put(buffer)

        num_loadable, size = min(len(slots), len(block_ids)), self._copier.max_blocks
        with ThreadPoolExecutor(self._num_buffers, "prefix cache file") as threads:
            for start in range(0, num_loadable, size):
                if len(pending) == self._num_buffers:
                    take()
                if time.monotonic() > deadline:
                    break
                part = [index for index in range(start, min(start + size, num_loadable)) if found[index]]
                buffer, wanted = self._buffers.get(), [entries[index] for index in part]
                pending.append((part, threads.submit(read_entries, self._file, wanted, buffer), buffer))
            while pending:
                take()
        return self._peers.agree(found)

    def can_save(self, wait: float = 0) -> bool:
        """Wait for a free buffer, which `save` needs, for at most `wait` seconds. Return whether there is one."""
        try:
            self._buffers.put(self._buffers.get(timeout=wait))
        except Empty:
            return False
        return True

    def save(self, blocks: Sequence[tuple[int, int, Name, int]]) -> None:
        """Write the current content of up to `max_blocks` blocks, given id, slot, name and heat of each."""
        self._peers.tell("save", blocks)
        buffer = self._buffers.get()
        event = self._copier.read([block_id for block_id, *_ in blocks], buffer)
        self._io.submit(self._write_buffer, blocks, buffer, event)

    def use_host(self, host: HostBlocks, pool: int) -> None:
        """Let `save_from_host` read a pool's blocks in this memory. For a single rank."""
        self._host, self._pool = host, pool

    def save_from_host(self, blocks: Sequence[tuple[int, int, Name, int]]) -> None:
        """Write blocks from their slots in host memory, given slot there, slot, name and heat of each. Their content
        must not change until `ended_saves` has them.
        """
        assert self._host is not None
        rows = self._host.rows(self._pool, [slot for slot, *_ in blocks])
        self._io.submit(self._write, blocks, rows, self._host.last_spill, True)

    def _write_buffer(self, blocks: Sequence[tuple[int, int, Name, int]], buffer: Tensor, event: Event) -> None:
        try:
            self._write(blocks, list(buffer), event)
        finally:
            self._agree()
            self._buffers.put(buffer)

    def _write(
        self,
        blocks: Sequence[tuple[int, int, Name, int]],
        rows: Sequence[Tensor],
        event: Event | None,
        from_host: bool = False,
    ) -> None:
        """Write the first bytes of each row [block_bytes or more], which are there when the event is done."""
        if event is not None:
            event.synchronize()
        for row, (place, slot, name, heat) in zip(rows, blocks, strict=False):
            try:
                if not self.has_failed:
                    self._file.write(slot, name, heat, row[: self.block_bytes].numpy())
                    self._has_warned = False
            except OSError as error:
                self._fail(error)
            if self._is_single:
                self._ended.append(EndedSave(slot, name, not self.has_failed, place if from_host else None))

    def ended_saves(self) -> list[EndedSave]:
        """Return the blocks whose writing has ended since the last call. For a single rank."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def retry(self) -> None:
        """Save again, after a failure."""
        self.has_failed = False

    def erase(self, slots: Sequence[int]) -> None:
        """Empty these slots, after what was to be written before. For a single rank."""
        self._io.submit(self._erase, slots)

    def _erase(self, slots: Sequence[int]) -> None:
        try:
            for slot in slots:
                self._file.erase(slot)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self.has_failed and not self._has_warned:
            self._has_warned = True
            until = "for now" if self._is_single else "any more"
            _log.warning("%s: the prefix cache is not saved %s: %s", self.path, until, error.strerror)
        self.has_failed = True

    def _agree(self) -> None:
        """Stop saving if another rank has failed."""
        if not min(self._peers.agree([int(not self.has_failed)])):
            self.has_failed = True

    def clear(self) -> None:
        """Forget all blocks."""
        self._peers.tell("clear")
        self._io.submit(self._clear).result()

    def _clear(self) -> None:
        try:
            self._file.clear()
        except OSError as error:
            self._fail(error)
        finally:
            self._agree()

    def close(self, heats: Iterable[tuple[int, int]] = ()) -> None:
        """Finish the queued writes, then write these heats (slot, heat) to this rank's file; only rank 0's are read."""
        self._peers.tell("close")
        self.reads.close()
        self._io.submit(self._write_heats, heats).result()
        self._file.close()

    def _write_heats(self, heats: Iterable[tuple[int, int]]) -> None:
        try:
            for slot, heat in heats:
                if not self.has_failed:
                    self._file.write_heat(slot, heat)
        except OSError as error:
            self._fail(error)


def open_block_file(
    options: BlockFileOptions, copier: Copier, peers: Peers, io: ThreadPoolExecutor
) -> BlockFile | None:
    """Open a rank's file. Return None if it cannot be used, after a warning, or if another rank's cannot be used.

    io: one thread, the same for all files of this rank: so all ranks write the same blocks in one order.
    """
    identity = {
        **options.identity,
        "model": fingerprint(options.folder),
        "layout of the KV cache": sha256(repr(copier.layout).encode()).hexdigest(),
        **({"forms": "deterministic"} if kernels.FORMS.deterministic else {}),
    }
    file, numbers = None, [-1, -1]
    try:
        file = CacheFile(options.path, identity, copier.block_bytes, options.max_bytes)
        numbers = [file.num_slots, copier.max_blocks]
    except CacheFileError as error:
        _log.warning("%s: the prefix cache will not survive a restart: the file %s", options.path, error)
    num_slots, max_blocks = peers.agree(numbers)
    if file is not None and num_slots >= 0:
        return BlockFile(file, copier, peers, io, num_slots, max_blocks)
    if file is not None:
        file.close()
    return None
