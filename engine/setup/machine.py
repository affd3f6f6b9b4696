"""Hardware and software versions of a measurement, so that it can be judged and repeated."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import engine
from engine.flags import command_line
from engine.worker.device import CpuDevice, CudaDevice
from engine.worker.parallel.cores import num_cores

ROOT = Path(engine.__file__).resolve().parents[1]


def environment() -> dict[str, Any]:
    """Return hardware, versions and command line, as recorded in every result file."""
    versions = {}
    for name in ("torch", "triton", "transformers", "vllm"):
        if (version := _version(name)) is not None:
            versions[name] = version
    found: dict[str, Any] = {
        "command": command_line(),
        "quire": engine.__version__,
        "commit": _run("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        **versions,
        "cpu_cores": os.cpu_count(),
        "cpu_isa": _said(CpuDevice.instruction_set),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")
        found["cuda"] = torch.version.cuda
    return found


PACKAGES = (
    "torch", "triton", "safetensors", "tokenizers", "huggingface-hub", "llguidance", "fastapi", "uvicorn", "pydantic",
    "transformers", "vllm",
)  # fmt: skip
VARIABLES = ("QUIRE_", "CUDA_", "HF_", "NCCL_", "OMP_", "PYTORCH_", "TRITON_")  # prefixes of variables to report
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # parts of names: values of such variables are not shown


def report() -> dict[str, str]:
    """Return the facts for a bug report about this machine and installation, by title. Contains no secrets."""
    known, cpu = environment(), CpuDevice()
    memory, cores = cpu.memory(), num_cores()
    found = {
        "quire": f"{engine.__version__} ({known['commit'] or 'no checkout'})",
        "python": f"{platform.python_version()} in {sys.prefix}",
        "system": platform.platform(),
        "cpu": f"{_cpu_name()}, {cores} of {os.cpu_count()} cores, PyTorch uses {torch.get_num_threads()}",
        "instruction set": _said(CpuDevice.instruction_set),
        "cpu kernels": _said(CpuDevice.kernels),
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.free / 2**30:.1f} free",
    }
    for index in range(torch.cuda.device_count()):
        gpu = CudaDevice(index)
        found[f"gpu {index}"] = f"{gpu.name}, {gpu.memory().total / 2**30:.1f} GiB, capability {gpu.capability}"
    found |= {name: str(known.get(name) or "none") for name in ("cuda", "driver")}
    found |= {name: version for name in PACKAGES if (version := _version(name)) is not None}
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            found[name] = "(set)" if any(word in name for word in SECRETS) else value
    return found


def _said(work: Callable[[], str]) -> str:
    """Return the result, or what is wrong with a variable."""
    try:
        return work()
    except ValueError as error:
        return str(error)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> str | None:
    """Return the command's output, None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
