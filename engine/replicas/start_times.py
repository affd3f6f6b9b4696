"""Durations of earlier starts with the same settings, kept in a small file to estimate the next one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from engine.config import EngineConfig

MAX_ENTRIES = 100  # the oldest entries are dropped


def times_file() -> Path:
    """Return the file's path, in `QUIRE_CACHE_DIR` or the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QUIRE_CACHE_DIR") or Path(cache) / "quire") / "starts.json"


def expected_seconds(config: EngineConfig) -> float | None:
    """Return the estimated seconds of a start, without download; None if not known."""
    seconds = _read().get(_name(config))
    return seconds if isinstance(seconds, float) and 0 < seconds < 1e5 else None


def remember(config: EngineConfig, seconds: float) -> None:
    """Record the duration of a start. Failure to write the file is ignored."""
    times = _read()
    times.pop(_name(config), None)
    times[_name(config)] = round(seconds, 2)
    file = times_file()
    written = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(dict(list(times.items())[-MAX_ENTRIES:])))
        written.replace(file)


def _read() -> dict[str, Any]:
    try:
        found = json.loads(times_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _name(config: EngineConfig) -> str:
    return hashlib.sha256(repr(config).encode()).hexdigest()[:16]
