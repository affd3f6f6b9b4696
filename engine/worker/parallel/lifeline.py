"""The lifeline of a child process: its standard input, which closes when the parent ends for any reason."""

from __future__ import annotations

import os
import threading


def end_with_parent() -> None:
    """Watch the lifeline in a thread, and exit this process at once when it closes."""
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def _watch() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
