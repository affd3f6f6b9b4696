"""Communication between the GPUs of one host, through memory of the peers that symmetric memory maps; else by NCCL.

Does not use NVLink multicast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from engine.models.shard import WeightAndEps
from engine.worker.parallel.communicator import GroupCommunicator

SMALL_BYTES = 256 << 10  # up to this size, sums send 32 bits at a time, each with its own tag
LARGE_BYTES = 8 << 20  # beyond this size, copy engines and NCCL are faster than kernels that write into peers' memory
CHANNEL_BYTES = 64 << 20  # of all ranks together: what a kernel gathers at once
CHUNK_BYTES = 32 << 20  # of a large sum, computed while the chunk before is on its way
NUM_SLOTS = 4  # for chunks on their way, see `OverlappedSum`
NUMBERS = 16 * NUM_SLOTS  # chunks are numbered modulo this
START_SECONDS = 600  # time for the ranks to connect


class RenumberedStore(Store):
    """A store for PyTorch's symmetric memory, whose ranks may be older or newer processes.

    Its keys, `…/NUMBER/RANK`, count the exchanges of the whole process. Here the first one has the number 0, so that
    a process that already had other peers finds the new ones.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}  # name → number of the first exchange here

    def _key(self, key: str) -> str:
        name, number, rank = key.rsplit("/", 2)
        return f"{name}/{int(number) - self._first.setdefault(name, int(number))}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(self._key(key)))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=START_SECONDS)) -> None:
        self._store.wait([self._key(key) for key in keys], timeout)


class PeerMemory:
    """Sections of symmetric memory: the same on each rank, and mapped by all ranks."""

    def __init__(self, device: torch.device, sizes: dict[str, int], ranks: dist.ProcessGroup | None = None) -> None:
        """sizes: bytes of each section. `ranks`: by default all. They create it at the same time."""
        from torch._C._distributed_c10d import ProcessGroup, _register_process_group
        from torch._C._distributed_c10d import _SymmetricMemory as Symmetric

        self._offsets, total = {}, 0
        for name, size in sizes.items():
            self._offsets[name], total = total, total + -(-size // 1024) * 1024
        self._memory = Symmetric.empty_strided_p2p((total,), (1,), torch.uint8, device).zero_()
        self._ranks = ranks
        store = dist.distributed_c10d._get_default_store()
        if ranks is not None:
            store = PrefixStore(f"ranks from {dist.get_process_group_ranks(ranks)[0]} on", store)
        # A group of its own, of which PyTorch uses the store alone.
        self._store = RenumberedStore(store)
        self._group = ProcessGroup(self._store, dist.get_rank(ranks), dist.get_world_size(ranks))
        name = f"quire-{uuid4().hex}"
        _register_process_group(name, self._group)  # type: ignore[arg-type]
        self._handle: Any = Symmetric.rendezvous(self._memory, name)
        self.barrier()  # before any rank writes into memory that its owner has still to zero

    def barrier(self) -> None:
        """Wait for the work of all ranks' GPUs."""
        torch.cuda.synchronize(self._memory.device)
        dist.barrier(self._ranks)

    def of(self, rank: int, name: str, length: int, dtype: torch.dtype) -> Tensor:
        """Return the section of a rank, as a tensor [length] on this device."""
        section: Tensor = self._handle.get_buffer(rank, (length,), dtype, self._offsets[name] // dtype.itemsize)
        return section

    def addresses(self, name: str) -> Tensor:
        """Return the addresses of all ranks' sections, [size] int64 on this device."""
        size = self._handle.world_size
        pointers = [self.of(rank, name, 1, torch.uint8).data_ptr() for rank in range(size)]
        return torch.tensor(pointers, dtype=torch.int64, device=self._memory.device)


def channel_capacity(num_ranks: int) -> int:
    """Return the bytes of each rank in the channel for larger tensors: enough for sums, and parts are aligned."""
    return max(CHANNEL_BYTES // num_ranks, LARGE_BYTES) // 1024 * 1024


class GpuCommunicator(GroupCommunicator):
    """Collectives between GPUs of one host, by default of all ranks. All make the same calls in the same order."""

    def __init__(self, device: torch.device, ranks: dist.ProcessGroup | None = None) -> None:
        """Create it on all these ranks at the same time."""
        from kernels.triton import collectives  # needs Triton

        super().__init__(device, ranks)
        self._kernels: ModuleType = collectives
        rank, size, programs = dist.get_rank(ranks), dist.get_world_size(ranks), collectives.PROGRAMS
        words, capacity = SMALL_BYTES // 4, channel_capacity(size)
        sizes = {"small": 2 * size * 8 * words, "large": 2 * size * capacity, "flags": 4 * size * programs}
        if size == 2:
            sizes |= OverlappedSum.sizes
        # It must live as long as the addresses in it are used.
        memory = self._memory = PeerMemory(device, sizes, ranks)

        def calls(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.small = collectives.Channel(rank, words, memory.addresses("small"), calls(words // collectives.WORDS))
        buffers, flags = memory.addresses("large"), memory.addresses("flags")
        self.large = collectives.Channel(rank, capacity, buffers, calls(programs), flags)
        self._overlapped = OverlappedSum(device, memory, rank, collectives.add_arrived) if size == 2 else None

    def all_reduce(self, x: Tensor) -> Tensor:
        return super().all_reduce(x) if self._is_large(x) else self._sum(x, None)

    def add_sum(self, residual: Tensor, x: Tensor, norm: WeightAndEps | None = None) -> Tensor | None:
        if self._is_large(x):
            if self._overlaps(residual):
                return self.add_gemm(residual, lambda rows: x[rows], norm)
            return super().add_sum(residual, x)
        if norm is not None and not self._is_small(x) and self._kernels.can_normalise(x):
            normed: Tensor = self._kernels.all_reduce(x, self.large, residual, norm)
            return normed
        self._sum(x, residual)
        return None

    def add_gemm(
        self, residual: Tensor, gemm: Callable[[slice], Tensor], norm: WeightAndEps | None = None
    ) -> Tensor | None:
        if self._overlapped is not None and self._overlaps(residual):
            can_normalise = norm is not None and self._kernels.can_normalise(residual)
            return self._overlapped.add_gemm(residual, gemm, norm if can_normalise else None)
        return super().add_gemm(residual, gemm, norm)

    def all_gather(self, x: Tensor, out: Tensor) -> Tensor:
        fits = x.is_contiguous() and out.is_contiguous() and x[:1].nbytes <= self.large.capacity
        gathered: Tensor = self._kernels.all_gather(x, self.large, out) if fits else super().all_gather(x, out)
        return gathered

    def _is_large(self, x: Tensor) -> bool:
        return x.nbytes > LARGE_BYTES or not x.is_contiguous() or not x.numel()

    def _overlaps(self, residual: Tensor) -> bool:
        """Return whether a sum of this size goes through `OverlappedSum`, which cannot be captured in a graph."""
        fits = residual.nbytes > LARGE_BYTES and residual.is_contiguous() and residual.dim() == 2
        return fits and self._overlapped is not None and not torch.cuda.is_current_stream_capturing()

    def _is_small(self, x: Tensor) -> bool:
        return 0 < self._kernels.num_words(x) <= self.small.capacity

    def _sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        total: Tensor = (
            self._kernels.all_reduce_small(x, self.small, residual)
            if self._is_small(x)
            else self._kernels.all_reduce(x, self.large, residual)
        )
        return total


def chunks(num_rows: int, most: int) -> Iterator[slice]:
    """Divide rows into chunks of `most`. The rest is two halves, since nothing hides the way of the last chunk."""
    start = 0
    while num_rows - start > most:
        yield slice(start, start + most)
        start += most
    half = min(-(-(num_rows - start) // 256) * 128, num_rows - start)
    yield slice(start, start + half)
    if start + half < num_rows:
        yield slice(start + half, num_rows)


class OverlappedSum:
    """Sums of two ranks' GEMMs of many tokens. While copy engines send one chunk of tokens, the next is computed.

    A chunk's copy is followed by that of its number into the slot's flag, for which the receiver waits. A rank computes
    chunk n after it has added chunk n - 2, which the peer computed after it had added chunk n - 4. So four slots
    suffice, and the memory of a part may be used again when the fourth chunk after it is computed.
    """

    sizes = {"slots": NUM_SLOTS * CHUNK_BYTES, "arrived": 4 * NUM_SLOTS}  # noqa: RUF012 - constants

    def __init__(self, device: torch.device, memory: PeerMemory, rank: int, add_arrived: Callable[..., None]) -> None:
        """add_arrived: see `kernels.triton.collectives`."""
        self._add_arrived = add_arrived
        here, there = (memory.of(r, "slots", NUM_SLOTS * CHUNK_BYTES, torch.uint8) for r in (rank, 1 - rank))
        self._arrived, self._slots_there = here.split(CHUNK_BYTES), there.split(CHUNK_BYTES)
        flags = memory.of(rank, "arrived", NUM_SLOTS, torch.int32).fill_(-1)
        self._flags, self._flags_there = flags.split(1), memory.of(1 - rank, "arrived", NUM_SLOTS, torch.int32).split(1)
        self._numbers = torch.arange(NUMBERS, dtype=torch.int32, device=device).split(1)
        memory.barrier()  # before the peer writes a flag
        self._copies = torch.cuda.Stream(device)
        self._computed = [torch.cuda.Event() for _ in range(NUM_SLOTS)]
        self._sent: deque[Tensor] = deque(maxlen=NUM_SLOTS)  # parts whose memory may not be used again yet
        self._num_chunks = 0

    def add_gemm(
        self, residual: Tensor, gemm: Callable[[slice], Tensor], norm: WeightAndEps | None = None
    ) -> Tensor | None:
        """Add the sum of both ranks' gemm(rows) to these rows of residual [T, n] in place. Returns its norm."""
        stream = torch.cuda.current_stream()
        normed = None if norm is None else torch.empty_like(residual)
        before: tuple[slice, Tensor, int] | None = None

        def receive(rows: slice, part: Tensor, number: int) -> None:
            slot = number % NUM_SLOTS
            arrived = self._arrived[slot][: part.nbytes].view(part.dtype)
            out = None if normed is None else normed[rows]
            self._add_arrived(residual[rows], part, arrived, self._flags[slot], number, norm, out)

        for rows in chunks(len(residual), max(CHUNK_BYTES // residual[:1].nbytes, 1)):
            part = gemm(rows)
            number = self._send(part, stream)
            if before is not None:
                receive(*before)
            before = rows, part, number
        if before is not None:
            receive(*before)
        return normed

    def _send(self, part: Tensor, stream: torch.cuda.Stream) -> int:
        """Copy a chunk into its slot on the peer, once `stream` has computed it. Returns its number."""
        number, slot = self._num_chunks % NUMBERS, self._num_chunks % NUM_SLOTS
        self._num_chunks += 1
        self._computed[slot].record(stream)
        self._copies.wait_event(self._computed[slot])
        with torch.cuda.stream(self._copies):
            self._slots_there[slot][: part.nbytes].copy_(part.view(-1).view(torch.uint8))
            self._flags_there[slot].copy_(self._numbers[number])
        self._sent.append(part)
        return number
