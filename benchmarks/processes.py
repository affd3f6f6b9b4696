"""Engines and servers as processes of their own, and the machine that they run on."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.errors import ConfigError
from engine.flags import command_line

ROOT = Path(__file__).resolve().parents[1]
_PORTS = itertools.cycle(random.SystemRandom().sample(range(10_000, 32_000), 10_000))


@contextlib.contextmanager
def process_group(
    command: list[str], engine: str, log_path: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of an engine; it and all that it starts end with the block. `variables`: of its environment."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **os.environ,
        **variables,
    }
    name, _, folder = engine.partition("@")
    if name == "quire":  # this checkout, or the one in the folder
        root = str(Path(folder).resolve()) if folder else str(ROOT)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_line(log_path: Path) -> str:
    """The end of what a process wrote, for an error message."""
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it said nothing"


def nvidia_smi(query: str) -> list[str] | None:
    """nvidia-smi's figures of the first GPU that this process sees; None if there is none."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", first]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.strip().split(", ")


def wait_for_free_gpu(patience: float = 30.0) -> None:
    """Until the memory of the process before is given back; not at all where there is no GPU."""
    end = time.time() + patience
    while time.time() < end:
        used = nvidia_smi("memory.used")
        if used is None or not used[0].isdigit() or int(used[0]) < 2048:
            return
        time.sleep(0.5)


def free_port() -> int:
    """Below the range that systems take ports from by themselves: no other process is given it before it is used."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def wait_until_ready(process: subprocess.Popen[bytes], port: int, deadline: float) -> bool:
    """False when the process has ended, or the time is over."""
    while process.poll() is None and time.time() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    return False


_MACHINE = """
import json, sys, time, torch
from engine.setup.machine import environment
found = environment()
if torch.cuda.is_available():
    def seconds(run, count=20):
        for _ in range(3): run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count): run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count / 1e3
    a = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    found["copy_TB_per_s"] = round(2 * a.nbytes / seconds(lambda: b.copy_(a)) / 1e12, 3)
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    found["matmul_TFLOP_per_s"] = round(2 * 8192**3 / seconds(lambda: m @ m) / 1e12, 1)
print(json.dumps(found))
"""


def describe_machine(scratch: Path) -> dict[str, Any]:
    """Versions and hardware, found in another process: this one never touches the GPU."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    shown = subprocess.run(
        [sys.executable, "-P", "-c", _MACHINE],
        env={**os.environ, "PYTHONPATH": path},
        cwd=scratch,
        capture_output=True,
        text=True,
    )
    if shown.returncode:
        raise ConfigError(f"cannot look at this machine: {(shown.stderr.strip().splitlines() or ['no output'])[-1]}")
    found: dict[str, Any] = json.loads(shown.stdout.splitlines()[-1])
    found["command"] = command_line()
    if shown_by_driver := nvidia_smi("power.limit,clocks.max.sm,clocks.max.mem"):
        keys = ("gpu_power_limit_W", "gpu_clock_MHz", "gpu_memory_clock_MHz")
        found |= dict(zip(keys, shown_by_driver, strict=True))
    return found
