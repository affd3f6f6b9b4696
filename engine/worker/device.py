"""The device of a worker: memory, work queue, copies to the device, and graph capture.

`find_device` selects a device. To support another kind of device, add a class to `DEVICES`, and its kernels to
`kernels.BACKENDS`.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

import kernels
from kernels.data.capability import compute_capability

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device's memory."""

    total: int
    free: int  # held by no process
    used: int  # held by this process, including memory cached by its allocator
    peak: int  # the most held by this process since its start or `reset_peak_memory`


class Event(Protocol):
    """A point in a device's work queue."""

    def query(self) -> bool:
        """Return whether all work queued before it is done."""

    def synchronize(self) -> None:
        """Wait until all work queued before it is done."""


class Stopwatch(Protocol):
    """Measures the time of work that is queued until `stop`."""

    def stop(self) -> None: ...
    def is_done(self) -> bool: ...
    def seconds(self) -> float:
        """Return the time that the work took. It must be done."""


class Queue(Protocol):
    """A work queue beside the device's own. As a context it gets the work that is queued meanwhile."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...
    def wait(self, event: Event) -> None:
        """Let the work queued from now on wait for the event."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Queue the work again. It reads and writes the same tensors as during the capture."""


class Device(Protocol):
    """The engine's needs of a device, besides tensors and kernels."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str:
        """For display, such as "NVIDIA H200"."""

    @property
    def is_accelerator(self) -> bool:
        """Return whether the device has its own memory and executes a queue asynchronously to the CPU."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """The CUDA compute capability; None for other devices."""

    @property
    def supports_fp8_cache(self) -> bool: ...

    @property
    def multiplies_bfloat16(self) -> bool:
        """Return whether the device has instructions for bfloat16 multiplication."""

    def memory(self) -> Memory: ...

    def reset_peak_memory(self) -> None:
        """Release cached memory, and measure `Memory.peak` from here on."""

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def record_event(self) -> Event:
        """An event after all work queued so far."""

    def stopwatch(self) -> Stopwatch:
        """Begin to measure the work that is queued from now on."""

    def wait(self, event: Event) -> None:
        """Let the work queued from now on wait for the event."""

    def side_queue(self) -> Queue:
        """Create a queue whose work runs beside that of the device's own queue."""

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised CPU tensor that the device can copy from and to without the CPU waiting."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Like `pinned`, for much memory, [num_bytes] uint8: of exactly this size, and steps of other threads are
        hardly delayed. It stays until `release_host_memory`.
        """

    def release_host_memory(self, memory: Tensor) -> None:
        """Release what `host_memory` returned. Nothing is copied from or to it any more."""

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros on the device. On a CPU, unlike with `torch.zeros`, memory is used only as it is written."""

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a CPU tensor to the device without waiting for queued work; a CPU returns it. Do not change it later."""

    def capture(self, work: Callable[[], R], share_memory_with: Graph | None = None) -> tuple[Graph, R]:
        """Capture the work that `work` queues. Returns the graph and the result of `work`, which every replay
        overwrites.

        Run `work` once before, so that kernels are compiled. Graphs that share memory must be replayed in the order of
        their captures, and each result must be read before the next replay. Raises `NotImplementedError` if the device
        does not support graphs.
        """


@dataclass(frozen=True, slots=True)
class _Done:
    """The event of a device that has no queue."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def _map_pages(num_bytes: int) -> mmap.mmap:
    """Map memory of zeros, in large pages where the system has them. It is used only as it is written."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Clock:
    """The stopwatch of a device that has no queue."""

    def __init__(self) -> None:
        self._start = self._end = perf_counter()

    def stop(self) -> None:
        self._end = perf_counter()

    def is_done(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._end - self._start


@dataclass(frozen=True, slots=True)
class _NoQueue:
    """The side queue of a device that has no queue."""

    def __enter__(self) -> object:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self, event: Event) -> None:
        pass


MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
# Of a group's files and of what they hold, as versions 2 and 1 name them: its limit, its use, the page cache in that.
CGROUP_NAMES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _available() -> int:
    """Return the available bytes of the CPU's memory. The page cache counts as free.

    In a container or a service this is at most the rest of its limit, and of the limits around it.
    """
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, LookupError):
        free = _available_on_macos() if sys.platform == "darwin" else _pages("SC_AVPHYS_PAGES")
    return max(min(free, *_rests_of_limits()), 0)


def _rests_of_limits() -> Iterator[int]:
    """Yield what each limit on this process's memory leaves, and at last a number that is no limit."""
    try:
        groups = {kinds: own for _, kinds, own in (line.split(":", 2) for line in OWN_CGROUPS.read_text().splitlines())}
    except (OSError, ValueError):
        groups = {}
    for kind, limit_name, held_name, cached_name in CGROUP_NAMES:
        own = Path(groups.get(kind, "/").strip("/"))
        for group in (own, *own.parents):  # a container sees its own group as the root
            folder = CGROUP / kind / group
            with contextlib.suppress(OSError, ValueError, LookupError):
                limit, held = (int((folder / name).read_text()) for name in (limit_name, held_name))
                of_kinds = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield limit - held + int(of_kinds[cached_name])
    yield sys.maxsize


def _pages(name: str) -> int:
    """Return the bytes of `sysconf`'s number of pages."""
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _available_on_macos() -> int:
    """Return the bytes that are free or can be freed at once; half of the memory if the system does not tell."""
    kinds = ("Pages free", "Pages inactive", "Pages speculative", "Pages purgeable")
    try:
        shown = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=10, check=True).stdout
        pages = dict(line.split(":", 1) for line in shown.splitlines()[1:])
        return sum(int(pages[kind].strip().rstrip(".")) for kind in kinds) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        return _pages("SC_PHYS_PAGES") // 2


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """The CPU. Every call is synchronous."""

    torch_device = torch.device("cpu")
    name = "CPU"
    is_accelerator = False
    capability = None
    supports_fp8_cache = True

    @property
    def multiplies_bfloat16(self) -> bool:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()

    @staticmethod
    def instruction_set() -> str:
        """See `kernels.cpu_instruction_set`."""
        return kernels.cpu_instruction_set()

    @staticmethod
    def kernels() -> str:
        """See `kernels.cpu_kernels`."""
        return kernels.cpu_kernels()

    @staticmethod
    def is_available() -> bool:
        return True

    @classmethod
    def current(cls) -> CpuDevice:
        return cls()

    def memory(self) -> Memory:
        total = _pages("SC_PHYS_PAGES")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)
        # The peak is cheap to read; the memory used now is only in /proc.
        return Memory(total, _available(), used=peak, peak=peak)

    def reset_peak_memory(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> Event:
        return _Done()

    def stopwatch(self) -> Stopwatch:
        return _Clock()

    def wait(self, event: Event) -> None:
        pass

    def side_queue(self) -> Queue:
        return _NoQueue()

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def release_host_memory(self, memory: Tensor) -> None:
        pass

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(_map_pages(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def capture(self, work: Callable[[], R], share_memory_with: Graph | None = None) -> tuple[Graph, R]:
        raise NotImplementedError("a CPU captures no graphs")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """An NVIDIA GPU. Its work queue is the current stream of the calling thread."""

    index: int
    graph_pool: tuple[int, int] | None = None  # where graphs are captured; None: in memory of their own
    is_accelerator = True
    multiplies_bfloat16 = True

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    @classmethod
    def current(cls) -> CudaDevice:
        return cls(torch.cuda.current_device())

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.index)

    @property
    def capability(self) -> tuple[int, int]:
        return compute_capability(self.index)

    @property
    def supports_fp8_cache(self) -> bool:
        return self.capability >= (8, 9)

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.index)
        used, peak = torch.cuda.memory_reserved(self.index), torch.cuda.max_memory_reserved(self.index)
        return Memory(total, free, used, peak)

    def reset_peak_memory(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.index)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def record_event(self) -> Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def stopwatch(self) -> Stopwatch:
        return _EventClock()

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self.index).wait_event(event)

    def side_queue(self) -> Queue:
        return _SideQueue(torch.cuda.Stream(self.torch_device))

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def host_memory(self, num_bytes: int) -> Tensor:
        memory = torch.frombuffer(_map_pages(num_bytes), dtype=torch.uint8)
        memory.zero_()  # pages are present before the driver locks them
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)):  # type: ignore[attr-defined]
            raise MemoryError(f"{num_bytes >> 20} MiB of host memory cannot be locked for copies to the GPU")
        return memory

    def release_host_memory(self, memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[attr-defined]

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def capture(self, work: Callable[[], R], share_memory_with: Graph | None = None) -> tuple[Graph, R]:
        graph = torch.cuda.CUDAGraph()
        pool: Any = share_memory_with.pool() if isinstance(share_memory_with, torch.cuda.CUDAGraph) else self.graph_pool
        self.synchronize()
        # NCCL's own thread may query events during the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
        return graph, result


class _EventClock:
    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def stop(self) -> None:
        self._end.record()

    def is_done(self) -> bool:
        return self._end.query()

    def seconds(self) -> float:
        return self._start.elapsed_time(self._end) / 1000


class _SideQueue:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._context = stream, torch.cuda.stream(stream)

    def __enter__(self) -> object:
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)


DEVICES: dict[str, type[CpuDevice] | type[CudaDevice]] = {"cuda": CudaDevice, "cpu": CpuDevice}  # the best one first


class DeviceNotFoundError(ValueError):
    """This machine has no such device, or PyTorch does not support it."""


def find_device(name: str) -> Device:
    """Return the device with a name in `DEVICES`; "auto": the first available one. Raises `DeviceNotFoundError`."""
    available = {known: device for known, device in DEVICES.items() if device.is_available()}
    if name == "auto":
        return next(iter(available.values())).current()
    if name not in available:
        raise DeviceNotFoundError(
            f"device must be {' or '.join(available)} (PyTorch sees nothing else here), got {name!r}"
        )
    return available[name].current()
