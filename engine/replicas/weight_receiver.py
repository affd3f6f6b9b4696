"""Receives weights in a process of its own: this one imports no PyTorch, and goes on with its requests."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from engine.errors import EngineError

ROOT = str(Path(__file__).resolve().parents[2])


async def receive_into(folder: str, address: str) -> None:
    """Write the tensors that `weight_transfer.send_weights` sends from an address to a folder. Raises `EngineError`."""
    paths = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "engine.setup.weight_transfer", address, folder,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    try:
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:  # cancelled
            process.kill()
            await process.wait()
    if process.returncode:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {process.returncode}"
        raise EngineError(f"no weights came from {address}: {reason}")
