"""What this process has freed goes back to the system."""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, and keeps most of what large requests took


def return_memory() -> None:
    """Takes some milliseconds, outside Python's global lock: for a thread."""
    if _trim is not None:
        _trim(0)
