"""Returns freed memory to the operating system."""

from __future__ import annotations

import ctypes

# Only glibc has it. Without it, glibc keeps most memory that large requests have used.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_memory() -> None:
    """Return freed memory to the system. Call it in a thread: it takes some milliseconds without Python's global lock.

    Does not run the garbage collector, which would block all threads: a request's objects are freed when it finishes.
    """
    if _trim is not None:
        _trim(0)
