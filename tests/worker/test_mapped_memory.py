"""Memory that is given back and comes back at the same addresses, with a driver that only pretends."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.worker import mapped_memory
from engine.worker.device import CpuDevice
from engine.worker.mapped_memory import MappedMemory

GRANULARITY = 64


class Driver:
    """Memory by its first address, whose content is unknown after `map`."""

    granularity = GRANULARITY

    def __init__(self, index: int) -> None:
        self.memory: dict[int, Tensor] = {}
        self.end, self.limit = 1 << 40, 10**9

    def reserve(self, size: int) -> int:
        self.end += 10**6
        return self.end

    def release(self, start: int, size: int) -> None:
        assert start not in self.memory

    def map(self, start: int, size: int) -> int:
        assert size % GRANULARITY == 0
        if sum(map(len, self.memory.values())) + size > self.limit:
            raise torch.OutOfMemoryError
        self.memory[start] = torch.full((size,), 99, dtype=torch.uint8)
        return start

    def unmap(self, start: int, size: int, handle: int) -> None:
        assert (start, size) == (handle, len(self.memory.pop(start)))

    def _at(self, start: int) -> tuple[Tensor, int]:
        first = max(each for each in self.memory if each <= start)
        return self.memory[first], start - first

    def to_host(self, host: Tensor, start: int) -> None:
        memory, at = self._at(start)
        host.copy_(memory[at : at + len(host)])

    def to_device(self, host: Tensor, start: int) -> None:
        memory, at = self._at(start)
        memory[at : at + len(host)] = host


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> MappedMemory:
    monkeypatch.setattr(mapped_memory, "Driver", Driver)
    monkeypatch.setattr(mapped_memory, "CHUNK_BYTES", 100)
    monkeypatch.setattr(MappedMemory, "_new_pool", lambda self, is_kept: None)
    device: Any = CpuDevice()
    monkeypatch.setattr(CpuDevice, "index", 0, raising=False)
    return MappedMemory(device)


def driver_of(mapped: MappedMemory) -> Any:
    return mapped._driver


def test_content_comes_back_at_the_same_addresses(mapped: MappedMemory) -> None:
    driver = driver_of(mapped)
    starts = [mapped._allocate(size, is_kept) for size, is_kept in ((150, True), (70, False), (64, True), (1, True))]
    assert [len(driver.memory[start]) for start in starts] == [192, 128, 64, 64]
    for start in starts:
        driver.memory[start].random_(0, 98)
    content = {start: memory.clone() for start, memory in driver.memory.items()}
    for _ in range(2):
        mapped.unmap()
        assert not driver.memory
        assert mapped.num_bytes == 0
        mapped.map()
        assert mapped.num_bytes == 448
        for start, is_kept in zip(starts, (True, False, True, True), strict=True):
            assert torch.equal(driver.memory[start], content[start]) == is_kept
    mapped.close()
    assert not driver.memory


def test_too_little_memory(mapped: MappedMemory) -> None:
    """It stays asleep, and wakes up later."""
    driver = driver_of(mapped)
    starts = [mapped._allocate(64, True) for _ in range(3)]
    driver.memory[starts[2]].fill_(5)
    mapped.unmap()
    driver.limit = 128
    with pytest.raises(torch.OutOfMemoryError):
        mapped.map()
    assert not driver.memory
    driver.limit = 192
    mapped.map()
    assert (driver.memory[starts[2]] == 5).all()
    driver.limit = 200
    with pytest.raises(torch.OutOfMemoryError):
        mapped._allocate(64, True)


def test_structures_are_as_the_driver_has_them() -> None:
    """Sizes of CUmemAllocationProp and CUmemAccessDesc in cuda.h."""
    assert ctypes.sizeof(mapped_memory._Properties) == 32
    assert ctypes.sizeof(mapped_memory._Access) == 12
    assert mapped_memory._Properties.location.offset == 8
    assert mapped_memory._Properties.win32.offset == 16


class Library:
    """NVIDIA's driver, of which one call fails."""

    def __init__(self, fails: str) -> None:
        self.calls: list[str] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return int(name == self._fails)

        return call


@pytest.mark.parametrize(
    ("fails", "undone"),
    [("cuMemCreate", []), ("cuMemMap", ["cuMemRelease"]), ("cuMemSetAccess", ["cuMemUnmap", "cuMemRelease"])],
)
def test_memory_that_cannot_be_mapped_is_given_back(fails: str, undone: list[str]) -> None:
    driver, library = mapped_memory.Driver.__new__(mapped_memory.Driver), Library(fails)
    driver._library, driver._properties = library, mapped_memory._Properties()
    driver._access = mapped_memory._Access()
    with pytest.raises(RuntimeError, match=fails):
        driver.map(1 << 40, 1 << 21)
    assert library.calls[library.calls.index(fails) + 1 :] == undone
