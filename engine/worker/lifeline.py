"""The lifeline of a child process: its standard input, which closes when its parent is gone, however that ended."""

from __future__ import annotations

import os
import threading


def end_with_parent() -> None:
    """Watch the lifeline in a thread, and end this process at once when it closes."""
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def _watch() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
