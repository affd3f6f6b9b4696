"""The compute capability for which a GPU's kernels are chosen."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

PORTABLE = (8, 0)  # what `QUIRE_PORTABLE=1` allows
PORTABLE_SHARED_MEMORY = 166912  # bytes that a program can have there


def is_portable() -> bool:
    """Return whether newer GPUs shall run the kernels of older ones: `QUIRE_PORTABLE` is set, and not 0."""
    return os.environ.get("QUIRE_PORTABLE", "0") not in ("", "0")


@functools.cache
def shared_memory(device: torch.device | None = None) -> int:
    """Return the bytes of shared memory that a program can have on a GPU, None for the current one. They are 99 KiB on
    consumer GPUs. Without a GPU (interpreted kernels) 160 KiB.
    """
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return 160 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    own = int(properties.shared_memory_per_block_optin)
    return min(own, PORTABLE_SHARED_MEMORY) if is_portable() else own


def compute_capability(device: torch.device | int | None = None) -> tuple[int, int]:
    """Return the CUDA compute capability of a GPU, None for the current one; at most `PORTABLE` if `is_portable`."""
    own = torch.cuda.get_device_capability(device)
    return min(own, PORTABLE) if is_portable() else own
