"""Host memory with room for blocks, and copies between it and the device while steps run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from operator import itemgetter
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

import kernels
from engine.core.batch import BlockLoad, BlockMoves
from engine.worker.device import CpuDevice, Device, Event

T = TypeVar("T")

CHUNK_BYTES = 256 << 20  # of host memory allocated at a time
CHUNKS_AHEAD = 4  # chunks that are ready before they are needed
STAGING_BYTES = 32 << 20  # of device memory, where blocks are packed before they cross the bus and after
NUM_STAGES = 4  # such pieces of memory for either way
MAX_IDS = 1024  # blocks copied by one kernel
NUM_IDS = 256  # such lists of blocks on their way
LOADING_SHARE = 0.1  # of the time between steps that the CPU queues copies of loads


class HostChunks:
    """The slots of one pool, allocated in chunks as they are needed, by a thread."""

    def __init__(
        self, device: Device, num_slots: int, block_bytes: int, threads: ThreadPoolExecutor, reserve_bytes: int = 0
    ) -> None:
        """`num_slots`: the most there may be. `reserve_bytes`: of the machine's memory that stay free."""
        self._device, self._threads, self._block_bytes, self._reserve = device, threads, block_bytes, reserve_bytes
        self._num_slots, self._in_chunk = num_slots, max(min(CHUNK_BYTES // block_bytes, num_slots), 1)
        self._chunks: list[Future[Tensor]] = []
        self._num_ready = 0  # of the first chunks
        self._is_full = False  # the machine has no more memory
        self.use(-1)

    @property
    def num_ready(self) -> int:
        """Number of slots that exist."""
        while self._num_ready < len(self._chunks) and _is_ready(self._chunks[self._num_ready]):
            self._num_ready += 1
        return min(self._num_ready * self._in_chunk, self._num_slots)

    def row(self, slot: int) -> Tensor:
        """Return the memory of a slot, [block_bytes] uint8."""
        return self._chunks[slot // self._in_chunk].result()[slot % self._in_chunk]

    def use(self, slot: int) -> None:
        """Allocate what will be needed after the slot."""
        wanted = min(slot // self._in_chunk + 1 + CHUNKS_AHEAD, -(-self._num_slots // self._in_chunk))
        while len(self._chunks) < wanted:
            self._chunks.append(self._threads.submit(self._allocate))

    def _allocate(self) -> Tensor:
        """Return [slots, block_bytes] uint8. Raises `MemoryError`, and from then on always."""
        size = self._in_chunk * self._block_bytes
        self._is_full = self._is_full or CpuDevice().memory().free < size + self._reserve
        if self._is_full:
            raise MemoryError("the rest of the host's memory stays free")
        return self._device.host_memory(size).view(self._in_chunk, self._block_bytes)

    def close(self) -> None:
        """Release the memory. Its thread has ended."""
        for chunk in self._chunks:
            if not chunk.cancelled() and chunk.exception() is None:
                self._device.release_host_memory(chunk.result())
        self._chunks.clear()

    def runs(self, slots: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield the memory of these slots, as the number and the rows of those that follow each other."""
        start = 0
        while start < len(slots):
            first, end = slots[start], start + 1
            while end < len(slots) and slots[end] == first + end - start and slots[end] % self._in_chunk:
                end += 1
            row = first % self._in_chunk
            yield start, self._chunks[first // self._in_chunk].result()[row : row + end - start]
            start = end


def _is_ready(chunk: Future[Tensor]) -> bool:
    """Return whether a chunk exists. When the machine has no more memory, there are fewer slots than wanted."""
    return chunk.done() and chunk.exception() is None


class Staging:
    """Device memory for packed blocks. On a CPU, where blocks need not cross a bus, it is host memory."""

    def __init__(self, device: Device, stage_bytes: int) -> None:
        self._memory = torch.empty(NUM_STAGES, stage_bytes, dtype=torch.uint8, device=device.torch_device)
        self._busy: deque[tuple[int, Event | None]] = deque((i, None) for i in range(NUM_STAGES))

    def rows(self, block_bytes: int) -> int:
        """Return how many blocks fit in a stage."""
        return min(self._memory.shape[1] // block_bytes, MAX_IDS)

    def take(self, block_bytes: int, count: int) -> tuple[int, Tensor, Event | None]:
        """Return a stage: its number, its first rows, and what its last user waits for."""
        number, event = self._busy.popleft()
        return number, self._memory[number, : count * block_bytes].view(count, block_bytes), event

    def give_back(self, number: int, event: Event) -> None:
        """The stage is free after the event."""
        self._busy.append((number, event))


class IdRing:
    """Memory for block ids on their way to the device, in one of its queues. No memory is allocated while steps run: to
    lock memory makes a GPU's queues wait for each other.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = device.pinned(NUM_IDS, MAX_IDS, dtype=torch.int64)
        self._on_device = torch.empty(NUM_IDS, MAX_IDS, dtype=torch.int64, device=device.torch_device)
        self._events: deque[tuple[int, Event | None]] = deque((i, None) for i in range(NUM_IDS))

    def upload(self, block_ids: Sequence[int]) -> Tensor:
        """Return up to `MAX_IDS` ids [N] int64, valid for what is queued before `NUM_IDS` more calls, in one queue."""
        number, event = self._events.popleft()
        if event is not None:
            event.synchronize()  # the copy of long ago
        host, ids = self._host[number, : len(block_ids)], self._on_device[number, : len(block_ids)]
        host.copy_(torch.tensor(block_ids, dtype=torch.int64))
        ids.copy_(host, non_blocking=True)
        self._events.append((number, self._device.record_event()))
        return ids


class HostBlocks:
    """Copies blocks to slots in host memory and back, see `BlockMoves`.

    Blocks are packed by a kernel in the device's own queue, between two steps, which takes little time. They cross the
    bus in a queue beside it. Loads cross the bus and are unpacked beside the steps: no step uses their blocks yet. To
    queue a long load takes the CPU milliseconds, so that is done in parts, each after a step has been launched.
    """

    def __init__(self, device: Device, block_bytes: Sequence[int], reserve_bytes: int = 0) -> None:
        """`block_bytes`: of each pool; 0: this rank has no part of its blocks. `reserve_bytes`: see `HostChunks`. Call
        `allocate` and `attach` next.
        """
        self._device, self._block_bytes, self._reserve = device, block_bytes, reserve_bytes
        self._threads = ThreadPoolExecutor(1, "host memory for blocks")
        self._chunks: list[HostChunks] = []
        self._num_slots: Sequence[int] = [0] * len(block_bytes)
        self._parts: list[kernels.BlockParts | None] = []
        self._staging = self._new_staging()
        self._spill_ids, self._load_ids = IdRing(device), IdRing(device)
        self._spill_queue, self._load_queue = device.side_queue(), device.side_queue()
        self._last_spill: Event | None = None
        self._to_queue: deque[Iterator[None]] = deque()  # loads, a part at a time
        self._loads: dict[int, Event] = {}  # that are queued and have not `arrived`
        self._last_part = 0.0  # the time when parts were queued last
        self._unreported: list[int] = []

    def _new_staging(self) -> list[Staging]:
        """Return that of spills and that of loads."""
        stage_bytes = staging_bytes(self._block_bytes) // (2 * NUM_STAGES)
        return [Staging(self._device, stage_bytes) for _ in range(2)]

    def allocate(self, num_slots: Sequence[int]) -> None:
        """Begin to allocate up to this many slots for each pool."""
        self._num_slots = num_slots
        self._chunks = [
            HostChunks(self._device, count if size else 0, max(size, 1), self._threads, self._reserve)
            for size, count in zip(self._block_bytes, num_slots, strict=True)
        ]

    def attach(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Use this memory of the device, see `KVCacheLayout.block_parts`. Compiles the kernels."""
        self._staging = self._staging or self._new_staging()
        self._parts = [kernels.BlockParts.of(each) if each else None for each in parts]
        for pool, place in enumerate(self._parts):
            if place is not None:
                number, packed, _ = self._staging[0].take(self._block_bytes[pool], 1)
                kernels.gather_blocks(packed, place, self._spill_ids.upload([0]))
                kernels.scatter_blocks(packed, place, self._spill_ids.upload([0]))
                self._staging[0].give_back(number, self._device.record_event())

    def detach(self) -> None:
        """Release the device's memory, until `attach`."""
        self.clear()
        self._parts, self._staging = [], []
        self._last_spill = None

    @property
    def num_slots(self) -> list[int]:
        """Number of slots of each pool that can be used by now."""
        return [
            chunks.num_ready if size else count
            for chunks, size, count in zip(self._chunks, self._block_bytes, self._num_slots, strict=True)
        ]

    def move(self, moves: BlockMoves) -> None:
        """Queue copies."""
        for number in moves.arrived:
            if number not in self._loads:  # this rank is later than rank 0
                self._queue_loads()
            if (event := self._loads.pop(number, None)) is not None:
                self._device.wait(event)  # rank 0 has seen it; this rank may be later
                self._spill_queue.wait(event)
        for pool, place in enumerate(self._parts):
            spills = [(block_id, slot) for of_pool, block_id, slot in moves.spills if of_pool == pool]
            if place is not None and spills:
                self._chunks[pool].use(max(slot for _, slot in spills))
                spills.sort(key=itemgetter(1))  # slots that follow each other are one copy; equal ones keep their order
                for part in _batched(spills, self._staging[0].rows(self._block_bytes[pool])):
                    self._spill(pool, place, *zip(*part, strict=True))
        if moves.loads:
            self._load_queue.wait(self._device.record_event())  # the blocks may still be used by their last holder
            if self._last_spill is not None:
                self._load_queue.wait(self._last_spill)
            self._to_queue.extend(map(self._load, moves.loads))

    def after_launch(self) -> None:
        """Queue copies of loads for a moment, while the device computes the step that was just launched."""
        start, last = perf_counter(), self._last_part
        if self._to_queue:
            self._queue_loads(start + LOADING_SHARE * (start - last))
        self._last_part = start

    @torch.inference_mode()
    def _queue_loads(self, until: float = math.inf) -> None:
        """Queue copies of loads, at least one part, until this time."""
        while self._to_queue:
            for _ in self._to_queue[0]:
                if perf_counter() >= until:
                    return
            self._to_queue.popleft()

    def _spill(self, pool: int, place: kernels.BlockParts, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        number, packed, event = self._staging[0].take(self._block_bytes[pool], len(slots))
        if event is not None:
            self._device.wait(event)
        kernels.gather_blocks(packed, place, self._spill_ids.upload(block_ids))
        self._spill_queue.wait(self._device.record_event())
        with self._spill_queue:
            for start, rows in self._chunks[pool].runs(slots):
                rows.copy_(packed[start : start + len(rows)], non_blocking=True)
            self._last_spill = self._device.record_event()
        self._staging[0].give_back(number, self._last_spill)

    def _load(self, load: BlockLoad) -> Iterator[None]:
        """Queue a part of a load for each item."""
        for pool, place in enumerate(self._parts):
            copies = sorted((slot, block_id) for of_pool, slot, block_id in load.copies if of_pool == pool)
            if place is None:
                continue
            for part in _batched(copies, self._staging[1].rows(self._block_bytes[pool])):
                slots, block_ids = zip(*part, strict=True)
                with self._load_queue:
                    self._load_part(pool, place, slots, block_ids)
                yield
        with self._load_queue:
            self._loads[load.number] = self._device.record_event()
        self._unreported.append(load.number)

    def _load_part(self, pool: int, place: kernels.BlockParts, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        number, packed, _ = self._staging[1].take(self._block_bytes[pool], len(slots))  # in queue order
        for start, rows in self._chunks[pool].runs(slots):
            packed[start : start + len(rows)].copy_(rows, non_blocking=True)
        kernels.scatter_blocks(packed, place, self._load_ids.upload(block_ids))
        self._staging[1].give_back(number, self._device.record_event())

    def rows(self, pool: int, slots: Iterable[int]) -> list[Tensor]:
        """Return the memory of these slots, which holds all spills once `last_spill` is done."""
        return [self._chunks[pool].row(slot) for slot in slots]

    @property
    def last_spill(self) -> Event | None:
        return self._last_spill

    def finished_loads(self) -> list[int]:
        """Return the loads that have ended since the last call. On rank 0."""
        ended = [number for number in self._unreported if self._loads[number].query()]
        self._unreported = [number for number in self._unreported if number not in ended]
        return ended

    def wait_for_load(self) -> None:
        """Wait until the oldest load has ended."""
        self._queue_loads()
        if self._unreported:
            self._loads[self._unreported[0]].synchronize()

    def clear(self) -> None:
        """Forget all loads, which have ended, or the device has failed."""
        self._to_queue.clear()
        self._loads.clear()
        self._unreported.clear()

    def close(self) -> None:
        """Release all memory."""
        self.detach()
        self._threads.shutdown(cancel_futures=True)
        for chunks in self._chunks:
            chunks.close()


def staging_bytes(block_bytes: Sequence[int]) -> int:
    """Return the device memory for packed blocks on their way, given the bytes of a block of each pool."""
    return 2 * NUM_STAGES * max(STAGING_BYTES, *block_bytes)


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
