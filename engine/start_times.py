"""How long earlier starts with the same settings took: an estimate for the next one, in a small file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from engine.config import EngineConfig

MAX_ENTRIES = 100  # the oldest are forgotten


def times_file() -> Path:
    """`QUIRE_CACHE_DIR`, else the user's cache folder, has it."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QUIRE_CACHE_DIR") or Path(cache) / "quire") / "starts.json"


def expected_seconds(config: EngineConfig) -> float | None:
    """Without download; None: it is not known."""
    seconds = _read().get(_name(config))
    return seconds if isinstance(seconds, float) and 0 < seconds < 1e5 else None


def remember(config: EngineConfig, seconds: float) -> None:
    """For the next start. Where no file can be written there is no estimate, and no harm."""
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
