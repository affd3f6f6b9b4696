"""Host memory for evicted blocks is taken as it is needed, and never what others need."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.worker.block_store import host_blocks
from engine.worker.block_store.host_blocks import HostChunks
from engine.worker.device import CpuDevice, Memory

CHUNK = 64 << 10
BLOCK = 16 << 10


class Machine:
    """A machine with this much free memory; each chunk takes some of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free, self.num_taken = free, 0
        monkeypatch.setattr(CpuDevice, "memory", lambda _: Memory(total=1 << 30, free=self.free, used=0, peak=0))
        monkeypatch.setattr(CpuDevice, "host_memory", self._take)
        monkeypatch.setattr(host_blocks, "CHUNK_BYTES", CHUNK)

    def _take(self, num_bytes: int) -> torch.Tensor:
        self.free -= num_bytes
        self.num_taken += num_bytes // CHUNK
        return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def wait(threads: ThreadPoolExecutor) -> None:
    """Wait for what was submitted before."""
    threads.submit(int).result()


def test_it_is_taken_a_few_chunks_ahead(monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor) -> None:
    machine = Machine(monkeypatch, free=100 * CHUNK)
    chunks = HostChunks(CpuDevice(), 4 * 50, BLOCK, threads)
    wait(threads)
    assert (machine.num_taken, chunks.num_ready) == (4, 16)
    chunks.use(3)
    wait(threads)
    assert machine.num_taken == 5
    chunks.use(4)
    wait(threads)
    assert machine.num_taken == 6


def test_what_others_need_stays_free(monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor) -> None:
    """Two chunks are taken, the third one would touch the reserve. Memory that is free later is not taken: it would lie
    behind a gap.
    """
    machine = Machine(monkeypatch, free=12 * CHUNK + 100)
    chunks = HostChunks(CpuDevice(), 4 * 50, BLOCK, threads, reserve_bytes=10 * CHUNK)
    wait(threads)
    assert (machine.num_taken, chunks.num_ready) == (2, 8)
    assert machine.free >= 10 * CHUNK
    machine.free = 100 * CHUNK
    chunks.use(7)
    wait(threads)
    assert (machine.num_taken, chunks.num_ready) == (2, 8)


def test_a_full_machine_has_none(monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor) -> None:
    machine = Machine(monkeypatch, free=CHUNK - 1)
    chunks = HostChunks(CpuDevice(), 4 * 50, BLOCK, threads)
    wait(threads)
    assert (machine.num_taken, chunks.num_ready) == (0, 0)
