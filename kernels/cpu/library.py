"""The CPU's own kernels, in C++: compiled for this machine's CPU when they are first wanted, and kept for later starts.

They are the sources in `native/`. Without a compiler, or where one does not understand them, there are none, and PyTorch computes
instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).with_name("native")
COMPILERS = ("c++", "g++", "clang++")  # `CXX` comes first
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
TIMEOUT = 300.0  # seconds
LANES = 16  # of a vector in the sources

logger = logging.getLogger("engine.kernels")


class _Call(ctypes.Structure):
    """`Call` in step.cpp."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class Recording:
    """Calls of native functions, one after the other, with the arguments and in the memory of the first time."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._kept: list[object] = []  # what the calls point to

    def add(self, function: Any, struct: ctypes.Structure, tensors: Sequence[Tensor | None]) -> None:
        self._calls.append(_Call(ctypes.cast(function, ctypes.c_void_p).value, ctypes.addressof(struct)))
        self._kept += (struct, *tensors)

    def replayed_by(self, native: Native) -> Callable[[], None]:
        """What makes all calls again."""
        calls = (_Call * len(self._calls))(*self._calls)
        kept, replay = (calls, *self._kept), native.functions.quire_replay

        def run(kept: object = kept) -> None:
            replay(calls, len(calls))

        return run


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
        with contextlib.suppress(OSError):  # the system has none
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = -whole.data_ptr() % self.PAGE
        return whole[start : start + size]


class Native:
    """The compiled functions. Each takes a pointer to its arguments."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self.functions, self.num_threads = functions, 1
        self.memory = LargePages()  # of packed weights
        functions.quire_replay.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self.recording: Recording | None = None

    def call(self, name: str, struct: ctypes.Structure, tensors: Sequence[Tensor | None]) -> None:
        """tensors: those that `struct` points to, for as long as a recording lasts."""
        function = getattr(self.functions, name)
        function(ctypes.byref(struct))
        if self.recording is not None:
            self.recording.add(function, struct, tensors)

    def set_threads(self, num_threads: int) -> None:
        """How many threads work together on one call."""
        self.num_threads = num_threads
        self.functions.quire_set_threads(num_threads)


@functools.cache
def library() -> Native | None:
    """The compiled kernels; None: there are none here. The first call may compile for some seconds."""
    compiler = find_compiler()
    if compiler is None or platform.system() != "Linux":
        logger.info("no C++ compiler is installed: PyTorch computes on the CPU, which is slower")
        return None
    try:
        native = Native(ctypes.CDLL(str(build(compiler, cache_folder()))))
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().split("\n")
        said = next((line for line in lines if "error" in line), lines[0])
        logger.warning("the CPU's kernels cannot be compiled, PyTorch computes instead: %s", said)
        return None
    native.set_threads(torch.get_num_threads())
    return native


def tile_rows() -> int:
    """Rows of a matrix that products read together: see products.cpp."""
    native = library()
    assert native is not None
    return LANES * native.functions.quire_blocks()


def find_compiler() -> str | None:
    named = os.environ.get("CXX")
    found = (shutil.which(name) for name in ((named,) if named else COMPILERS))
    return next((path for path in found if path), None)


def cache_folder() -> Path:
    """In `QUIRE_CACHE_DIR`, else in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QUIRE_CACHE_DIR") or Path(cache) / "quire") / "kernels"


def build(compiler: str, folder: Path) -> Path:
    """The compiled library in `folder`, which is made now unless it is there: its name stands for sources, options and CPU.

    OSError or SubprocessError when that fails. Loading a file runs what it holds: `folder` must be the user's alone.
    """
    sources = sorted(SOURCES.iterdir())
    target = folder / f"cpu-{_fingerprint(sources)}.so"
    if target.exists():
        return target
    logger.info("compiling kernels for this CPU, once")
    start = time.monotonic()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "cpu.so"
        files = [str(source) for source in sources if source.suffix == ".cpp"]
        command = [compiler, *OPTIONS, "-o", str(made), *files]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
        made.replace(target)  # whole, or not at all: several processes may be here
    logger.info("compiled kernels for this CPU in %.1f s", time.monotonic() - start)
    return target


def _fingerprint(sources: Sequence[Path]) -> str:
    parts = [platform.machine(), _cpu_features(), *OPTIONS, *(source.read_text("utf-8") for source in sources)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))
