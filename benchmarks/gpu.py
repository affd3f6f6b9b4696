"""What needs a GPU says so before it does anything else."""

from __future__ import annotations

import sys

import torch


def need_gpus(program: str, count: int = 1) -> None:
    """Ends the program with one line where PyTorch sees fewer NVIDIA GPUs than `count`."""
    found = torch.cuda.device_count()
    if found < count:
        needed = "an NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"
        sys.exit(f"{program}: needs {needed}; PyTorch sees {found or 'none'} here")
