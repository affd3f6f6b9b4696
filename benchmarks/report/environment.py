"""Where and with what a measurement was made, so that a figure can be judged and repeated."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from typing import Any

import torch

import engine


def environment() -> dict[str, Any]:
    """Hardware, versions and the command line, as they go into every result file."""
    versions = {}
    for name in ("torch", "triton", "transformers", "vllm"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {
        "command": " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "quire": engine.__version__,
        "commit": _run("git", "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        **versions,
        "cpu_cores": os.cpu_count(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")
        found["cuda"] = torch.version.cuda
    return found


def _run(*command: str) -> str | None:
    """The command's output; None when it cannot be had."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
