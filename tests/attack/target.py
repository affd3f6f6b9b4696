"""The server under attack: `quire serve` with the bundled model on loopback, and what the operating system says of
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.processes import free_port
from tests.support.served import ROOT

START_SECONDS = 240.0


@dataclass(frozen=True)
class Answer:
    """Bytes that came back before the server closed the connection. `status` 0: nothing that is HTTP."""

    status: int
    received: bytes
    seconds: float

    @property
    def body(self) -> bytes:
        """The part behind the first head."""
        return self.received.partition(b"\r\n\r\n")[2]


def descendants(pid: int) -> list[int]:
    """The process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def is_running(pid: int) -> bool:
    """Return whether there is such a process and it has not ended: its parent may not have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class Target:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    keys: Mapping[str, str] = field(default_factory=dict)  # of each client, by its name; none: the server is open
    start_seconds: float = 0.0  # until it was ready
    source: str = ""  # address that requests are sent from; empty: any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def headers(self, client: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[client]}"} if self.keys else {}

    def pids(self) -> list[int]:
        """The API process and all that descend from it."""
        return descendants(self.process.pid)

    def engine_pid(self) -> int:
        """Id of the process that holds the model."""
        if not (pids := self.engine_pids()):
            raise ProcessLookupError("there is no engine process")
        return pids[0]

    def engine_pids(self) -> list[int]:
        """Ids of the replicas' processes."""
        return self._pids_of(b"ipc:")

    def follower_pids(self) -> list[int]:
        """Ids of the ranks other than 0."""
        return self._pids_of(b"engine.worker.parallel.follower")

    def _pids_of(self, word: bytes) -> list[int]:
        """Ids of the processes with this in their command line."""
        found = []
        for pid in self.pids()[1:]:
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def resident_bytes(self) -> int:
        """Resident memory of all its processes."""
        return sum(self.resident_by_process())

    def resident_by_process(self) -> tuple[int, int]:
        """Bytes of the API process, and of the engine process with all others."""
        found = [0, 0]
        for pid in self.pids():
            with contextlib.suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                found[pid != self.process.pid] += pages * os.sysconf("SC_PAGE_SIZE")
        return found[0], found[1]

    def open_files(self) -> int:
        """Descriptors of all its processes."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                total += len(os.listdir(f"/proc/{pid}/fd"))
        return total

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the labels that are not named; 0 where there is none."""
        text = httpx.get(f"{self.url}/metrics", timeout=60, headers=self.headers("bystander")).text
        total = 0.0
        for found, value in re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", text, re.MULTILINE):
            if all(f'{key}="{each}"' in found for key, each in labels.items()):
                total += float(value)
        return total

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        source = (self.source, 0) if self.source else None
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=source)

    async def send(self, request: bytes, patience: float = 120.0) -> Answer:
        """Raw bytes, and what comes back until the server closes the connection."""
        start, received = time.perf_counter(), b""
        try:
            async with asyncio.timeout(patience):
                reader, writer = await self.connect()
                try:
                    writer.write(request)
                    await _ignoring_resets(writer.drain())
                    received = await _read_all(reader)
                finally:
                    writer.close()
        except TimeoutError:
            return Answer(-1, received, time.perf_counter() - start)
        match = re.match(rb"HTTP/1\.1 (\d{3})", received)
        return Answer(int(match[1]) if match else 0, received, time.perf_counter() - start)

    async def post(self, path: str, body: bytes, patience: float = 120.0, **headers: str) -> Answer:
        """A request with a JSON body, on a connection of its own."""
        return await self.send(self.request("POST", path, body, **headers), patience)

    def request(self, method: str, path: str, body: bytes = b"", client: str = "attacker", **headers: str) -> bytes:
        """A request as bytes, with the client's key; the server closes the connection after its answer."""
        lines = {
            "Host": "127.0.0.1",
            "Connection": "close",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self.headers(client),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            parts.append(part)
    return b"".join(parts)


async def _ignoring_resets(waiting: object) -> None:
    """A server that refuses a body need not read it."""
    with contextlib.suppress(ConnectionError):
        await waiting  # type: ignore[misc]


@contextlib.contextmanager
def serving(
    *flags: str,
    keys: Mapping[str, str] | None = None,
    module: str = "quire",
    environment: Mapping[str, str] | None = None,
    model: Path = ROOT / "configs" / "demo",
) -> Iterator[Target]:
    """A server that is ready, ended with SIGTERM; `keys`: of its clients; `module`: what is run instead of `quire`."""
    port = free_port()
    command = [
        sys.executable, "-m", module, "serve", str(model), "--host", "127.0.0.1", "--port",
        str(port),
        *flags,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="quire-attack-") as folder:
        log, key_file = Path(folder) / "log", Path(folder) / "keys"
        if keys:
            key_file.write_text("".join(f"{name}: {key}\n" for name, key in keys.items()))
            command = [*command, "--api-key-file", str(key_file)]
        with log.open("wb") as file:
            env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=env)
        target, start = Target(port, process, log, keys or {}), time.monotonic()
        try:
            _wait_until_ready(target)
            target.start_seconds = time.monotonic() - start
            yield target
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(target: Target) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{target.url}/health", timeout=10).status_code == 200:
                return
        if target.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server does not start:\n{target.log.read_text()[-5000:]}")
        time.sleep(0.1)
