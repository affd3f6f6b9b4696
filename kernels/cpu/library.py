"""The CPU's own kernels, in C++: compiled for this machine's CPU when they are first wanted, and kept for later starts.

They are the sources in `native/`. An installation may come with them compiled. Without a compiler, or where one does
not understand them, there are none, and PyTorch computes instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import platform
import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import build
from kernels.cpu.choice import Choices, mode
from kernels.cpu.instruction_set import instruction_set

logger = logging.getLogger("engine.kernels")


class _Call(ctypes.Structure):
    """`Call` in step.cpp."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class Layout(ctypes.Structure):
    """`Layout` in products.cpp: lanes of a vector, rows of a matrix that GEMMs read together, offset of bytes,
    channels of bfloat16 side by side.
    """

    _fields_ = tuple((name, ctypes.c_int32) for name in ("lanes", "tile_rows", "byte_offset", "bf16_channels"))


class Recording:
    """Calls of native functions, one after the other, with the arguments and in the memory of the first time."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._kept: list[object] = []  # what the calls point to

    def add(self, function: Any, struct: ctypes.Structure, tensors: Sequence[Tensor | None]) -> None:
        self._calls.append(_Call(ctypes.cast(function, ctypes.c_void_p).value, ctypes.addressof(struct)))
        self._kept += (struct, *tensors)

    def replayed_by(self, native: Native) -> Callable[[], None]:
        """Return a function that makes all calls again."""
        calls = (_Call * len(self._calls))(*self._calls)
        kept, replay = (calls, *self._kept), native.functions.quire_replay

        def run(kept: object = kept) -> None:
            replay(calls, len(calls))

        return run


class Waiting(Recording):
    """Calls of this thread that are not made yet."""

    def __init__(self, native: Native) -> None:
        super().__init__()
        self.thread, self._native = threading.get_ident(), native
        self.num_calls, self.num_batches = 0, 0  # that were made

    def make(self) -> None:
        """Make the calls that wait, in one."""
        if self._calls:
            self.num_calls, self.num_batches = self.num_calls + len(self._calls), self.num_batches + 1
            self.replayed_by(self._native)()
            self._calls.clear()
            self._kept.clear()


class LargePages:
    """Memory of large pages, where the system has such, for what is read from end to end in every step."""

    PAGE, CHUNK = 2 << 20, 64 << 20  # bytes; pages that nothing is kept in take no memory

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """A contiguous copy."""
        size = -(-tensor.nbytes // 64) * 64
        if size > len(self._free):
            self._free = self._map(max(size, self.CHUNK))
        own, self._free = self._free[: tensor.nbytes], self._free[size:]
        return own.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _map(self, size: int) -> Tensor:
        memory = mmap.mmap(-1, size + self.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # the system has none
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = -whole.data_ptr() % self.PAGE
        return whole[start : start + size]


class Native:
    """The compiled functions. Each takes a pointer to its arguments."""

    def __init__(self, functions: ctypes.CDLL, name: str) -> None:
        self.functions, self.instruction_set, self.num_threads = functions, name, 1
        self.choices = Choices()  # until `measure.choose`, the C++ kernels compute all that they can
        self.layout = Layout()
        functions.quire_layout(ctypes.byref(self.layout))
        self.memory = LargePages()  # of packed weights
        functions.quire_replay.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self.recording: Recording | None = None
        self.waiting: Waiting | None = None

    def call(self, name: str, struct: ctypes.Structure, tensors: Sequence[Tensor | None]) -> None:
        """tensors: those that `struct` points to, for as long as a recording lasts or the call waits."""
        function = getattr(self.functions, name)
        if (waiting := self.waiting) is not None and waiting.thread == threading.get_ident():
            waiting.add(function, struct, tensors)
            return
        function(ctypes.byref(struct))
        if self.recording is not None:
            self.recording.add(function, struct, tensors)

    def set_threads(self, num_threads: int) -> None:
        """Set the number of threads that work together on one call."""
        self.num_threads = num_threads
        self.functions.quire_set_threads(num_threads)


@functools.cache
def library() -> Native | None:
    """The compiled kernels; None: there are none here. The first call may compile for some seconds.

    ValueError: `QUIRE_CPU_ISA` or `QUIRE_CPU_KERNELS` is not valid.
    """
    name, compiler = instruction_set(), build.find_compiler()
    if mode() == "pytorch":
        return None
    functions = build.load_prebuilt(name)
    if functions is None and (compiler is None or platform.system() not in ("Linux", "Darwin")):
        missing = "no C++ compiler is installed" if compiler is None else "the kernels in C++ need Linux or macOS"
        logger.warning("%s: PyTorch computes on the CPU, which is slower", missing)
        return None
    try:
        native = Native(functions or build.load(compiler or (), build.cache_folder(), name), name)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "the CPU's kernels cannot be compiled by %s, PyTorch computes instead, which is slower: %s",
            " ".join(compiler or ()), _reason(error),
        )  # fmt: skip
        return None
    native.set_threads(torch.get_num_threads())
    return native


def _reason(error: Exception) -> str:
    """The line with which a compiler, assembler or linker first says what is wrong."""
    said = getattr(error, "stderr", None) or str(error)
    lines = (said if isinstance(said, str) else said.decode(errors="replace")).strip().split("\n")
    return next((line for line in lines if re.search("error|cannot find|undefined", line, re.IGNORECASE)), lines[0])


def layout() -> Layout:
    """Return how the compiled kernels store packed weights."""
    native = library()
    assert native is not None
    return native.layout
