"""Forks of the test process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hide_garbage_from_forks() -> Iterator[None]:
    """Keep forks made in this context from collecting garbage of this process.

    Its finalizers may wait for threads, which only this process has: a fork that runs them waits forever.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
