"""Compiling the C++ kernels in `native/`: once for each instruction set, by one process for all.

`python -m kernels.cpu.build` compiles them beforehand for the instruction sets of most CPUs, for images and wheels.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO

from kernels.cpu.instruction_set import compiler_options

SOURCES = Path(__file__).with_name("native")
PREBUILT = Path(__file__).with_name("prebuilt")  # libraries that an installation may come with
# Machine → what `detect` finds: on Haswell to Zen 3, Alder Lake, four kinds of servers with AVX-512; ARM by year.
COMMON = {
    "x86_64": (
        "x86-64-v3",
        "x86-64-v3+avxvnni",
        "x86-64-v4",
        "x86-64-v4+avx512vnni",
        "x86-64-v4+avx512vnni+avx512bf16",
        "x86-64-v4+avx512vnni+avx512bf16+amx",
    ),
    "aarch64": ("aarch64", "aarch64+dotprod", "aarch64+dotprod+bf16+i8mm"),
}
COMPILERS = ("c++", "g++", "clang++")  # `CXX` comes first
OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno", "-fPIC", "-pthread", "-Wno-psabi")
TIMEOUT = 300.0  # seconds
SCRATCH = "compiling-"  # begins the name of a folder with what is being compiled
LOOK_SECONDS = 0.2  # between two looks at another process that compiles
UNUSED_SECONDS = 60 * 86400  # after which a library that no start has loaded is removed

logger = logging.getLogger("engine.kernels")


def _told_nobody(done: int, total: int) -> None: ...


compiling: Callable[[int, int], None] = _told_nobody  # told how many of the files are compiled


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


def load(compiler: Sequence[str], folder: Path, name: str) -> ctypes.CDLL:
    """The library compiled for the instruction set `name`: the one kept in `folder`, else it is made now, and kept
    there unless others may write to it.

    Its file's name stands for instruction set, sources and options. OSError or SubprocessError when it cannot be made
    or loaded.
    """
    sources, kept = sorted(SOURCES.iterdir()), path(folder, name)
    with contextlib.suppress(OSError):  # a file system without room, or one that is only read
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (found := _load_kept(kept)) is not None:
        return found
    keep = is_own(folder) and os.access(folder, os.W_OK)
    if not keep:
        logger.warning("compiled kernels are not kept in %s: others may write to it, or this user may not", folder)
    with one_process(folder) if keep else contextlib.nullcontext():
        if (found := _load_kept(kept)) is not None:  # another process made it meanwhile
            return found
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder if keep else None) as scratch:
            made = Path(scratch) / kept.name
            build(compiler, [source for source in sources if source.suffix == ".cpp"], made, name)
            compiled = ctypes.CDLL(str(made))
            if keep:
                made.chmod(0o700)  # whatever this user's files are like otherwise
                made.replace(kept)  # whole, or not at all
                _remove_unused(folder)
        return compiled


def load_prebuilt(name: str) -> ctypes.CDLL | None:
    """Return the library that this installation came with; None: it has none for the instruction set `name`."""
    return _load_kept(path(PREBUILT, name))


def is_built(name: str) -> bool:
    """Return whether a library for the instruction set `name` is there."""
    return any(path(folder, name).exists() for folder in (PREBUILT, cache_folder()))


def path(folder: Path, name: str) -> Path:
    """Return where the library for an instruction set is kept."""
    return folder / f"cpu-{name}-{_fingerprint(sorted(SOURCES.iterdir()), name)}.so"


def build(compiler: Sequence[str], sources: Sequence[Path], made: Path, name: str) -> None:
    """Compile `sources` into the library `made`, at the same time; OSError or SubprocessError when that fails."""
    logger.info("compiling kernels for %s, once: about 10 s of CPU time", name)
    start = time.monotonic()
    english = os.environ | {"LC_ALL": "C", "TMPDIR": str(made.parent)}  # compilers that are killed leave files there

    def run(*arguments: str) -> None:
        command = [*compiler, *OPTIONS, *compiler_options(name), *arguments]
        subprocess.run(
            command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, env=english
        )

    objects = [str(made.with_name(f"{source.stem}.o")) for source in sources]
    compiling(0, len(sources))
    with ThreadPoolExecutor(_num_cores()) as pool:
        tasks = [pool.submit(run, "-c", "-o", to, str(source)) for source, to in zip(sources, objects, strict=True)]
        for done, task in enumerate(as_completed(tasks), 1):
            task.result()
            compiling(done, len(sources))
    run("-shared", "-o", str(made), *objects)
    logger.info("compiled kernels for %s in %.1f s", name, time.monotonic() - start)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_own(path: Path) -> bool:
    """Return whether only this user and root can change a file or folder: loading a library runs what it holds."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _load_kept(kept: Path) -> ctypes.CDLL | None:
    if is_own(kept.parent) and kept.exists() and is_own(kept):
        with contextlib.suppress(OSError):  # it is damaged, or of a system with other libraries
            library = ctypes.CDLL(str(kept))
            with contextlib.suppress(OSError):  # a file system that is only read
                os.utime(kept)  # its last use
            return library
    return None


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: other processes wait for what this one makes, and tell `compiling` how far it is.

    The system frees the lock of a process that ends in any way. What such a one has left is removed.
    """
    with open(folder / "lock", "a") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            _wait_for(file, folder)
            for left in folder.glob(f"{SCRATCH}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield


def _wait_for(lock: IO[str], folder: Path) -> None:
    """Take a lock. Raises OSError where there are none."""
    total, told = len(list(SOURCES.glob("*.cpp"))), -1
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            done = min(len(list(folder.glob(f"{SCRATCH}*/*.o"))), total)
        if told < 0:
            logger.info("another process compiles or measures kernels: waiting for it")
        if done != told:
            compiling(done, total)
            told = done
        time.sleep(LOOK_SECONDS)


def _remove_unused(folder: Path) -> None:
    """Remove what older versions or other CPUs have made, and no start has used for long."""
    oldest = time.time() - UNUSED_SECONDS
    for library in folder.glob("cpu-*.so"):
        with contextlib.suppress(OSError):  # another process has removed it
            if library.stat().st_mtime < oldest:
                library.with_suffix(".json").unlink(missing_ok=True)
                library.unlink()


def _fingerprint(sources: Sequence[Path], name: str) -> str:
    parts = [*OPTIONS, *compiler_options(name), *(source.read_text("utf-8") for source in sources)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def main(names: Sequence[str]) -> None:
    """Compile for some instruction sets into PREBUILT, by default for the common ones of this machine's kind.

    A kind of COMMON stands for its sets: with `CXX`, a cross compiler compiles them.
    """
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("no C++ compiler is installed")
    PREBUILT.mkdir(exist_ok=True)
    kinds = names or [kind for kind in COMMON if kind == platform.machine()]
    for name in (each for kind in kinds for each in COMMON.get(kind, (kind,))):
        with tempfile.TemporaryDirectory(dir=PREBUILT) as scratch:
            made = Path(scratch) / path(PREBUILT, name).name
            build(compiler, sorted(SOURCES.glob("*.cpp")), made, name)
            made.chmod(0o755)
            print(made.replace(PREBUILT / made.name))


if __name__ == "__main__":
    main(sys.argv[1:])
