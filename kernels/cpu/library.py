"""The CPU's own kernels, in C++: compiled for this machine's CPU when they are first wanted, and kept for later starts.

They are the sources in `native/`. Without a compiler, or where one does not understand them, there are none, and
PyTorch computes instead.
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
import re
import shlex
import shutil
import stat
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
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
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
        """Return a function that makes all calls again."""
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
        """Set the number of threads that work together on one call."""
        self.num_threads = num_threads
        self.functions.quire_set_threads(num_threads)


@functools.cache
def library() -> Native | None:
    """The compiled kernels; None: there are none here. The first call may compile for some seconds."""
    compiler = find_compiler()
    if compiler is None or platform.system() != "Linux":
        missing = "no C++ compiler is installed" if compiler is None else "the kernels in C++ need Linux"
        logger.info("%s: PyTorch computes on the CPU, which is slower", missing)
        return None
    try:
        native = Native(load(compiler, cache_folder()))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "the CPU's kernels cannot be compiled by %s, PyTorch computes instead, which is slower: %s",
            " ".join(compiler), _reason(error),
        )  # fmt: skip
        return None
    native.set_threads(torch.get_num_threads())
    return native


def _reason(error: Exception) -> str:
    """The line with which a compiler, assembler or linker first says what is wrong."""
    said = getattr(error, "stderr", None) or str(error)
    lines = (said if isinstance(said, str) else said.decode(errors="replace")).strip().split("\n")
    return next((line for line in lines if re.search("error|cannot find|undefined", line, re.IGNORECASE)), lines[0])


def tile_rows() -> int:
    """Rows of a matrix that products read together: see products.cpp."""
    native = library()
    assert native is not None
    return LANES * native.functions.quire_blocks()


def find_compiler() -> list[str] | None:
    """A command: `CXX`, which may have arguments, else what is installed."""
    named = shlex.split(os.environ.get("CXX", ""))
    for name, *arguments in [named] if named else [[name] for name in COMPILERS]:
        if (path := shutil.which(name)) is not None:
            return [path, *arguments]
    return None


def cache_folder() -> Path:
    """In `QUIRE_CACHE_DIR`, else in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QUIRE_CACHE_DIR") or Path(cache) / "quire") / "kernels"


def load(compiler: Sequence[str], folder: Path) -> ctypes.CDLL:
    """The compiled library: the one kept in `folder`, else it is made now, and kept there unless others may write to
    it.

    Its name stands for sources, options and CPU. OSError or SubprocessError when it cannot be made or loaded.
    """
    sources = sorted(SOURCES.iterdir())
    kept = folder / f"cpu-{_fingerprint(sources)}.so"
    with contextlib.suppress(OSError):  # a file system without room, or one that is only read
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = _is_own(folder)
    if own and kept.exists() and _is_own(kept):
        with contextlib.suppress(OSError):  # it is damaged, or of a system with other libraries
            return ctypes.CDLL(str(kept))
    keep = own and os.access(folder, os.W_OK)
    if not keep:
        logger.warning("compiled kernels are not kept in %s: others may write to it, or this user may not", folder)
    with tempfile.TemporaryDirectory(dir=folder if keep else None) as scratch:
        made = Path(scratch) / kept.name
        build(compiler, [source for source in sources if source.suffix == ".cpp"], made)
        compiled = ctypes.CDLL(str(made))
        if keep:
            made.chmod(0o700)  # whatever this user's files are like otherwise
            made.replace(kept)  # whole, or not at all: several processes may be here
    return compiled


def build(compiler: Sequence[str], sources: Sequence[Path], made: Path) -> None:
    """Compile `sources` into the library `made`; OSError or SubprocessError when that fails."""
    logger.info("compiling kernels for this CPU, once")
    start = time.monotonic()
    command = [*compiler, *OPTIONS, "-o", str(made), *map(str, sources)]
    english = os.environ | {"LC_ALL": "C"}
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, env=english)
    logger.info("compiled kernels for this CPU in %.1f s", time.monotonic() - start)


def _is_own(path: Path) -> bool:
    """Return whether only this user and root can change a file or folder: loading a library runs what it holds."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _fingerprint(sources: Sequence[Path]) -> str:
    parts = [platform.machine(), _cpu_features(), *OPTIONS, *(source.read_text("utf-8") for source in sources)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    """Return the CPU's features, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(names)))
