"""Compilation of kernels in processes beside this one, into Triton's cache, from which this process then loads them.

Generating a kernel's first IR is work in Python, at which threads of one process take turns. The processes never use a
GPU: what they are sent says what to compile for. They start as forks of one process that has imported the kernels, and
end when this process closes its ends of their sockets, or itself ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import importlib
import inspect
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

import kernels

SERVE = "from kernels.cuda.compile_processes import serve; serve()"
MAX_COMPILE_THREADS = 16
MAX_WAITING_THREADS = 128


class CompileProcesses:
    """`num` processes, started at once, which are ready some seconds later. To be closed."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._free: list[socket.socket | None] = []  # None: a process that has died
        self._waiting: list[tuple[int, int]] = []  # a heap of those that wait for one
        self._changed = threading.Condition()
        pairs = [socket.socketpair() for _ in range(num)]
        self._sockets = [own for own, _ in pairs]
        theirs = [str(their.fileno()) for _, their in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *theirs],
            pass_fds=[int(fd) for fd in theirs],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # so that all of them can be ended together
        )
        for own, their in pairs:
            their.close()
            self._free.append(own)

    def __enter__(self) -> CompileProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for own in self._sockets:
            own.close()
        threading.Thread(target=self._reap, name="quire-compile-processes").start()

    def _reap(self) -> None:
        try:
            self._process.wait(timeout=1)  # it has reaped the others then, which a container's first process may not
        except subprocess.TimeoutExpired:  # imports or compilations that are no longer waited for
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def compile(self, source: Any, target: Any, options: dict[str, Any]) -> None:
        """Have a process compile a kernel as `triton.compile` would. Of the kernels that wait, large ones come first.

        Errors are left to the caller's own compilation.
        """
        try:
            message, size = _pickled((source, target, options)), _size(source.fn)
        except Exception:  # what pickle raises depends on what it meets
            return
        process = self._take(size)
        if process is not None:
            try:
                process.sendall(len(message).to_bytes(8, "little") + message)
                if not process.recv(1):
                    process = None
            except OSError:
                process = None
        with self._changed:
            self._free.append(process)
            self._changed.notify_all()

    def _take(self, size: int) -> socket.socket | None:
        """Wait until a process is free and no larger kernel waits. Return the process, or None for one that has
        died.
        """
        with self._changed:
            ticket = (-size, threading.get_ident())
            heapq.heappush(self._waiting, ticket)
            self._changed.wait_for(lambda: self._free and self._waiting[0] == ticket)
            heapq.heappop(self._waiting)
            self._changed.notify_all()
            return self._free.pop()


def _size(kernel: Any) -> int:
    """Return the length of the kernel's source file: kernels of long files take longest to compile."""
    return len(inspect.getsource(sys.modules[kernel.fn.__module__]))


class CompileMode(triton.AsyncCompileMode):  # type: ignore[misc]
    """Compiles in threads, each of which first has a process compile the kernel, unless the cache holds it."""

    def __init__(self, threads: ThreadPoolExecutor, processes: CompileProcesses | None) -> None:
        super().__init__(threads, ignore_errors=True)
        self.processes = processes
        self._signatures: set[str] = set()  # whose launchers are built
        self._lock = threading.Lock()

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        processes = self.processes

        def compile_elsewhere() -> Any:
            found = inspect.getclosurevars(compile_fn).nonlocals  # of Triton's function, which takes no arguments
            known = {"src", "target", "options"} <= found.keys()
            if processes is not None and known and not _is_cached(key, found["src"].name):
                processes.compile(found["src"], found["target"], vars(found["options"]))
            kernel = compile_fn()
            self._build_launcher(kernel)
            return kernel

        return super().submit(key, compile_elsewhere, finalize_fn)

    def _build_launcher(self, kernel: Any) -> None:
        """Triton 3.6 builds one in C for each signature, when the first such kernel is launched, unless it finds it
        built.
        """
        signature = str(kernel.src.signature.values())
        with self._lock:
            if signature in self._signatures:
                return
            self._signatures.add(signature)
        with contextlib.suppress(Exception):  # the kernel's first launch raises it again
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


@contextlib.contextmanager
def compiling_only(processes: CompileProcesses | None = None) -> Iterator[None]:
    """Kernels launched in this context are compiled in parallel instead of run; on leaving it all of them are compiled.

    `processes`: compile them, as far as they can, instead of threads of this one.

    Their outputs stay unwritten. A kernel that fails to compile raises its error when it is next launched. For the
    start of a program: no other thread may launch a kernel meanwhile.
    """
    run = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    # With processes, threads only wait for them and build launchers.
    num_threads = min(os.cpu_count() or 1, MAX_COMPILE_THREADS) if processes is None else MAX_WAITING_THREADS
    try:
        with ThreadPoolExecutor(num_threads) as threads, CompileMode(threads, processes):
            yield
    finally:
        JITFunction.run = run


def _is_cached(key: str, name: str) -> bool:
    """Return whether `triton.compile` will find a kernel, by the names that it gives its files."""
    return bool(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(f"{name[:150]}.json"))


class _Pickler(pickle.Pickler):
    """Writes a jitted function as the name by which its module has it, and its key in Triton's cache.

    Triton (`DependenciesFinder._update_hash`) includes the globals of a called function in the caller's key only if the
    called function's key was computed before. So keys depend on the order of their computation, and a process that
    compiles must use the key of the process that loads.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, JITFunction):
            return NotImplemented
        module, name = value.fn.__module__, value.fn.__name__
        key: Any = value.cache_key
        if getattr(sys.modules[module], name, None) is not value:
            raise pickle.PicklingError(f"{module} does not have this {name}")
        return _jitted, (module, name, key)


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _jitted(module: str, name: str, key: str) -> Any:
    function = getattr(importlib.import_module(module), name)
    function.hash = key
    return function


def serve() -> None:
    """The first process: forks one for each socket that it has inherited, and waits for them."""
    for module in kernels.BACKENDS["cuda"]:
        importlib.import_module(module)
    sockets = [socket.socket(fileno=int(fd)) for fd in sys.argv[1:]]
    while sockets:
        own = sockets.pop()
        if os.fork() == 0:
            for other in sockets:  # whose ends are to be noticed
                other.close()
            _compile_all(own)
            os._exit(0)
        own.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _compile_all(own: socket.socket) -> None:
    """Compile what comes, and answer each with one byte."""
    with own.makefile("rb") as requests:
        while size := requests.read(8):
            with contextlib.suppress(Exception):  # which the other side will find out itself
                source, target, options = pickle.loads(requests.read(int.from_bytes(size, "little")))
                triton.compile(source, target=target, options=options)
            own.sendall(b".")
