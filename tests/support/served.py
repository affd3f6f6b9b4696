"""`quire serve` in processes of its own, for tests that meet Quire as its users do."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from benchmarks.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
QUIRE = (sys.executable, "-m", "quire")


@contextlib.contextmanager
def serve(model: Path, *flags: str, quire: Sequence[str] = QUIRE) -> Iterator[str]:
    """The base URL of a server that answers; at the end it must stop in peace. `quire`: words of the command."""
    port = free_port()
    command = [*quire, "serve", str(model), *flags, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)

        def written() -> str:
            log.seek(0)
            return log.read()[-10_000:]

        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 400  # it may have to compile the kernels first
            while not _answers(url):
                assert process.poll() is None, written()
                assert time.monotonic() < deadline, written()
                time.sleep(0.2)
            yield url
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0, written()
        finally:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def metric(url: str, name: str) -> float:
    """The sum of a metric over its labels, from /metrics."""
    found = re.findall(
        rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", httpx.get(f"{url}/metrics", timeout=60).text, re.MULTILINE
    )
    assert found, name
    return sum(map(float, found))


def blocks_in_use(url: str, patience: float = 60) -> float:
    """The KV cache's use once it has fallen to nothing, or when `patience` seconds are over."""
    deadline = time.monotonic() + patience
    while (usage := metric(url, "vllm:kv_cache_usage_perc")) and time.monotonic() < deadline:
        time.sleep(0.3)
    return usage
