"""GPU memory that can be given back while its addresses stay: what CUDA graphs hold is valid again afterwards.

Addresses are reserved once; physical memory is mapped there and unmapped (`cuMemCreate`, `cuMemMap`). PyTorch allocates
tensors in it through a memory pool whose allocator is a Python function.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.worker.device import CudaDevice

_log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20  # of host memory
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_PROT_
_OUT_OF_MEMORY = 2  # CUDA_ERROR_


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Driver:
    """The calls of NVIDIA's driver for one device."""

    def __init__(self, index: int) -> None:
        """Raises `OSError` if there is no driver."""
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        location = _Location(_DEVICE, index)
        self._properties = _Properties(_PINNED, 0, location)
        self._access = _Access(location, _READ_WRITE)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self.granularity = granularity.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: out of memory")
        if status:
            raise RuntimeError(f"{name}: error {status} of the CUDA driver")

    def reserve(self, size: int) -> int:
        """Return the start of `size` addresses."""
        start = ctypes.c_uint64()
        zero = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(start), ctypes.c_size_t(size), ctypes.c_size_t(0), zero, zero)
        return start.value

    def release(self, start: int, size: int) -> None:
        """Undo `reserve`."""
        self._call("cuMemAddressFree", ctypes.c_uint64(start), ctypes.c_size_t(size))

    def map(self, start: int, size: int) -> int:
        """Map new memory, of any content, to these addresses. Returns its handle."""
        handle, bytes_ = ctypes.c_uint64(), ctypes.c_size_t(size)
        zero = ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), bytes_, ctypes.byref(self._properties), zero)
        try:
            self._call("cuMemMap", ctypes.c_uint64(start), bytes_, ctypes.c_size_t(0), handle, zero)
            try:
                access, one = ctypes.byref(self._access), ctypes.c_size_t(1)
                self._call("cuMemSetAccess", ctypes.c_uint64(start), bytes_, access, one)
            except Exception:
                self._call("cuMemUnmap", ctypes.c_uint64(start), bytes_)
                raise
        except Exception:
            self._call("cuMemRelease", handle)
            raise
        return handle.value

    def unmap(self, start: int, size: int, handle: int) -> None:
        """Give the memory back."""
        self._call("cuMemUnmap", ctypes.c_uint64(start), ctypes.c_size_t(size))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def to_host(self, host: Tensor, start: int) -> None:
        """Queue a copy of the addresses from `start` on to host memory [n] uint8."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = ctypes.c_size_t(len(host))
        self._call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host.data_ptr()), ctypes.c_uint64(start), size, stream)

    def to_device(self, host: Tensor, start: int) -> None:
        """Queue a copy from host memory [n] uint8 to the addresses from `start` on."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = ctypes.c_size_t(len(host))
        self._call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(start), ctypes.c_void_p(host.data_ptr()), size, stream)


@dataclass(slots=True)
class _Segment:
    start: int
    size: int
    is_kept: bool  # its content survives
    handle: int | None


class MappedMemory:
    """Memory of one GPU that `unmap` gives back and `map` brings back, at the same addresses.

    Tensors made within `kept` have their content again, those made within `dropped` any. PyTorch never gives such
    memory back: `close` does, once no tensor in it is used any more.
    """

    def __init__(self, device: CudaDevice) -> None:
        """Raises `OSError` or `RuntimeError` where the driver or PyTorch cannot do this."""
        self._device, self._driver = device, Driver(device.index)
        self._segments: list[_Segment] = []
        self._host: list[Tensor] = []
        self._functions: list[Any] = []
        self._kept, self._dropped = self._new_pool(is_kept=True), self._new_pool(is_kept=False)

    def _new_pool(self, is_kept: bool) -> Any:
        def allocate(size: int, device: int, stream: int | None) -> int:
            try:
                return self._allocate(size, is_kept)
            except Exception:  # PyTorch reports that it is out of memory
                _log.warning("no memory that can be given back during sleep", exc_info=True)
                return 0

        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(allocate)
        address = ctypes.cast(function, ctypes.c_void_p).value or 0
        # Called when PyTorch frees memory, perhaps when the interpreter has ended: a function of C that does nothing.
        nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value or 0
        allocator = torch._C._cuda_customAllocator(address, nothing)  # type: ignore[attr-defined]
        self._functions += [function, allocator]  # they live as long as the pools
        return torch.cuda.MemPool(allocator)

    def _allocate(self, size: int, is_kept: bool) -> int:
        size = -(-size // self._driver.granularity) * self._driver.granularity
        start = self._driver.reserve(size)
        try:
            handle = self._driver.map(start, size)
        except Exception:
            self._driver.release(start, size)
            raise
        self._segments.append(_Segment(start, size, is_kept, handle))
        return start

    @property
    def graph_pool(self) -> tuple[int, int]:
        """The pool in which CUDA graphs are to be captured."""
        found: tuple[int, int] = self._kept.id
        return found

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Make tensors whose content survives, within the context."""
        with own_workspaces(), torch.cuda.use_mem_pool(self._kept):
            yield

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Make tensors whose content is lost, within the context."""
        with torch.cuda.use_mem_pool(self._dropped):
            yield

    @property
    def num_bytes(self) -> int:
        """Bytes that are mapped."""
        return sum(segment.size for segment in self._segments if segment.handle is not None)

    def unmap(self) -> None:
        """Give the memory back. Nothing may use it until `map`."""
        self._device.synchronize()
        kept = sum(segment.size for segment in self._segments if segment.is_kept)
        while len(self._host) * CHUNK_BYTES < kept:
            self._host.append(self._device.host_memory(CHUNK_BYTES))
        for host, start in self._pieces():
            self._driver.to_host(host, start)
        self._device.synchronize()
        self._unmap()

    def _unmap(self) -> None:
        for segment in self._segments:
            if segment.handle is not None:
                self._driver.unmap(segment.start, segment.size, segment.handle)
                segment.handle = None

    def map(self) -> None:
        """Have the memory again. Raises `torch.OutOfMemoryError` if there is too little; it is given back then."""
        try:
            for segment in self._segments:
                if segment.handle is None:
                    segment.handle = self._driver.map(segment.start, segment.size)
        except Exception:
            self._unmap()
            raise
        for host, start in self._pieces():
            self._driver.to_device(host, start)
        self._device.synchronize()

    def _pieces(self) -> Iterator[tuple[Tensor, int]]:
        """Yield pieces of host memory, and the addresses of their content."""
        at = 0
        for segment in self._segments:
            done = 0
            while segment.is_kept and done < segment.size:
                index, offset = divmod(at, CHUNK_BYTES)
                count = min(segment.size - done, CHUNK_BYTES - offset)
                yield self._host[index][offset : offset + count], segment.start + done
                done, at = done + count, at + count

    def close(self) -> None:
        """Give everything back. No tensor in this memory may be used any more."""
        self._device.synchronize()
        self._unmap()
        for host in self._host:
            self._device.release_host_memory(host)
        self._host.clear()


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Let cuBLAS allocate its workspaces anew within the context, and after it.

    PyTorch makes one for each stream when it is first used, and keeps it. One that was made in memory that can be given
    back, as in the capture of a graph, would be used by the graphs of the next engine in this process.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def mapped_memory(device: CudaDevice) -> MappedMemory | None:
    """Return memory that can be given back; None where that is not possible."""
    try:
        return MappedMemory(device)
    except (OSError, RuntimeError, AttributeError, TypeError):
        return None
