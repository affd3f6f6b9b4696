"""Reads blocks of the prefix cache file while steps run. Threads read and verify; blocks are copied between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from torch import Tensor

from engine.worker.block_store.block_copier import Copier
from engine.worker.block_store.cache_file import CacheFile, Entry, Name
from engine.worker.device import Event

NUM_READERS = 4

FileBlock = tuple[int, Name, int]  # slot in the file, the name expected there, block on the device


@dataclass(slots=True)
class _Part:
    """Blocks that are read into one buffer."""

    number: int  # of the load
    blocks: Sequence[FileBlock]


class BlockReads:
    """Loads of blocks, by number. Only the thread that launches steps calls it."""

    def __init__(self, file: CacheFile, copier: Copier) -> None:
        self._file, self._copier = file, copier
        self._threads = ThreadPoolExecutor(NUM_READERS, "prefix cache file")
        self._buffers: list[Tensor] = []  # free ones
        self._num_buffers = 0
        self._waiting: deque[_Part] = deque()
        self._reading: deque[tuple[_Part, Future[list[bool]], Tensor]] = deque()
        self._copying: deque[tuple[Event, Tensor]] = deque()
        self._num_parts: dict[int, int] = {}  # of each load: to come
        self._failed: dict[int, list[tuple[int, Name]]] = {}  # of each load: slots and names

    def begin(self, number: int, blocks: Sequence[FileBlock]) -> None:
        """Begin to read these blocks, at least one."""
        size = self._copier.max_blocks
        parts = [_Part(number, blocks[start : start + size]) for start in range(0, len(blocks), size)]
        self._num_parts[number], self._failed[number] = len(parts), []
        self._waiting += parts
        self._submit()

    def _submit(self) -> None:
        while self._copying and self._copying[0][0].query():
            self._buffers.append(self._copying.popleft()[1])
        while self._waiting and (buffer := self._free_buffer()) is not None:
            part = self._waiting.popleft()
            self._reading.append((part, self._threads.submit(self._read, part.blocks, buffer), buffer))

    def _free_buffer(self) -> Tensor | None:
        if not self._buffers and self._num_buffers < NUM_READERS:
            self._num_buffers += 1
            return self._copier.new_buffer()
        return self._buffers.pop() if self._buffers else None

    def _read(self, blocks: Sequence[FileBlock], buffer: Tensor) -> list[bool]:
        entries = [(self._file.entry(slot), name) for slot, name, _ in blocks]
        return read_entries(
            self._file, [e if e is not None and e.name == name else None for e, name in entries], buffer
        )

    def finished(self, is_wanted: Callable[[int], bool]) -> list[tuple[int, list[tuple[int, Name]]]]:
        """Queue copies of what was read to the device, and return the loads that have ended: their numbers, and slots
        and names of the blocks that are not there. `is_wanted`: whether a load's blocks are still to be written.
        """
        ended = []
        while self._reading and self._reading[0][1].done():
            part, reading, buffer = self._reading.popleft()
            valid = reading.result()
            ids = [block_id for (*_, block_id), is_valid in zip(part.blocks, valid, strict=True) if is_valid]
            if ids and is_wanted(part.number):
                self._copying.append((self._copier.write(buffer, ids), buffer))
            else:
                self._buffers.append(buffer)
            failed = self._failed[part.number]
            failed += [(slot, name) for (slot, name, _), each in zip(part.blocks, valid, strict=True) if not each]
            self._num_parts[part.number] -= 1
            if not self._num_parts[part.number]:
                del self._num_parts[part.number]
                ended.append((part.number, self._failed.pop(part.number)))
        self._submit()
        return ended

    def wait(self, seconds: float) -> None:
        """Wait until something was read, at most so long."""
        if self._reading:
            wait([self._reading[0][1]], seconds)
        elif self._copying:
            self._copying[0][0].synchronize()

    def close(self) -> None:
        """Drop all loads."""
        self._threads.shutdown(cancel_futures=True)


def read_entries(file: CacheFile, entries: Sequence[Entry | None], buffer: Tensor) -> list[bool]:
    """Fill the buffer's first rows with the valid entries. Return which entries are valid."""
    rows, row, valid = buffer.numpy(), 0, []
    for entry in entries:
        valid.append(entry is not None and file.read(entry, rows[row]))
        row += valid[-1]
    return valid
