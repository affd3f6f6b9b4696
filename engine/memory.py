"""What this process has freed goes back to the system."""

from __future__ import annotations

import ctypes
import gc

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, and keeps most of what large requests took


def return_memory() -> None:
    """Takes some milliseconds, most of them outside Python's global lock: for a thread."""
    gc.collect()  # what failed holds on to itself by its traceback; what was there at the start is frozen, and not looked at
    if _trim is not None:
        _trim(0)
