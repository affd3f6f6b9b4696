"""What this process has freed goes back to the system."""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, and keeps most of what large requests took


def return_memory() -> None:
    """Takes some milliseconds outside Python's global lock: for a thread. Garbage is not collected, for which all threads would
    wait: what a request has made is freed when it ends.
    """
    if _trim is not None:
        _trim(0)
