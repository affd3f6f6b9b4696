"""Reads a checkpoint's JSON files and lists folders for error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.models.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. ModelError names the file when it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:  # malformed JSON or not UTF-8
        raise ModelError(f"{path}: is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not a {type(value).__name__}; download it again")
    return value


def listing(folder: Path, limit: int = 8) -> str:
    """What `folder` holds, for an error message: "a, b, c and 4 more"."""
    names = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "nothing"
