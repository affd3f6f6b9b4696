"""Processes of the engine as forks of a process that has imported everything, since each import takes 1.7 s of a core.

`python -m tests.support.fork_server ADDRESS` is that process. It computes nothing, so that it has no threads, which
forks would lack. Its standard input is its lifeline.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

MODULES = {"engine.replicas.process_main", "engine.worker.parallel.follower", "tests.composition.faulty_process"}
OWN = {"PYTEST_CURRENT_TEST", "PYTHONPATH", "QUIRE_LOG_FORMAT", "CUDA_VISIBLE_DEVICES"}
MAX_MESSAGE, MAX_FILES = 1 << 20, 16
HIGH = 500  # no process has so many descriptors open


class Forks:
    """Starts processes as forks of the one at an address."""

    def __init__(self, address: str) -> None:
        self.address, self._environment = address, _inherited(os.environ)

    def as_subprocess(self) -> Any:
        """Return what stands for `subprocess` in a module that starts processes."""
        return SimpleNamespace(**{**vars(subprocess), "Popen": self._popen})

    def _popen(self, command: Sequence[str], **options: Any) -> Fork | subprocess.Popen[bytes]:
        """Start a command as `subprocess.Popen` does: as a fork, or if its imports might differ, as a new process."""
        module, *arguments = command[command.index("-m") + 1 :]
        if module not in MODULES or _inherited(options["env"]) != self._environment:
            return subprocess.Popen(command, **options)
        return Fork(self.address, [module, *arguments], options["env"], list(options.get("pass_fds", ())))


class ForkServer(Forks):
    """The process that has imported everything, seen by its parent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder / "forks"))
        command = [sys.executable, "-P", "-m", "tests.support.fork_server", self.address]
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
        )
        assert self._process.stdout is not None
        assert self._process.stdout.read(1) == b"1", "the process of forks has ended"

    def close(self) -> None:
        self._process.communicate()


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OWN}


class Fork:
    """A fork, with the methods of `subprocess.Popen` that tests and the engine use."""

    returncode: int | None = None

    def __init__(self, address: str, arguments: list[str], environment: Mapping[str, str], pass_fds: list[int]) -> None:
        self.args = arguments
        theirs, ours = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(ours, "wb", buffering=0)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(address)
        targets = [0, 1, 2, *pass_fds]
        message = json.dumps([arguments, dict(environment), os.getcwd(), targets]).encode()
        socket.send_fds(self._connection, [message], [theirs, 1, 2, *pass_fds])
        os.close(theirs)
        self.pid = int(self._connection.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            # A peeked answer stays for other threads that wait.
            self.returncode = int(self._connection.recv(64, socket.MSG_PEEK) or -signal.SIGKILL)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        self._connection.close()
        self.stdin.close()


def serve(address: str) -> None:
    """Fork for each connection; tell it the process id, and then how the process has ended."""
    import engine.replicas.process
    import engine.worker.parallel.follower  # noqa: F401
    from engine.worker.parallel import launcher

    assert len(os.listdir("/proc/self/task")) == 1, "forks would lack threads"
    del sys.modules["engine.worker.parallel.follower"]  # forks run it as a program
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    launcher.subprocess = Forks(address).as_subprocess()  # type: ignore[attr-defined]  # forks start forks, too
    os.write(1, b"1")
    children: dict[int, socket.socket] = {}
    while True:
        ready = select.select([0, listener.fileno(), wake.fileno()], [], [])[0]
        if 0 in ready:
            return
        if wake.fileno() in ready:
            wake.recv(4096)
            for pid, code in _ended(children):
                with contextlib.suppress(OSError), children.pop(pid) as asking:
                    asking.send(str(code).encode())
        if listener.fileno() in ready:
            asking = listener.accept()[0]
            message, files, *_ = socket.recv_fds(asking, MAX_MESSAGE, MAX_FILES)
            pid = os.fork()
            if pid == 0:
                for each in (listener, wake, waker, asking, *children.values()):
                    each.close()
                _run(message, files)
            for descriptor in files:
                os.close(descriptor)
            children[pid] = asking
            asking.send(str(pid).encode())


def _ended(children: Mapping[int, Any]) -> Iterator[tuple[int, int]]:
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            yield pid, os.waitstatus_to_exitcode(status)


def _run(message: bytes, files: list[int]) -> NoReturn:
    """Become a process that runs a module."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        (module, *arguments), environment, folder, targets = json.loads(message)
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path += [path for path in environment["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
        kept = [os.dup2(each, HIGH + number, inheritable=False) for number, each in enumerate(files)]
        for each in files:
            os.close(each)
        for target, each in zip(targets, kept, strict=True):
            os.dup2(each, target)
            os.close(each)
        random.seed()
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
