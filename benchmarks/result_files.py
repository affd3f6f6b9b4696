"""Measurements as JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save(result: dict[str, Any], path: str | Path) -> None:
    """Write the file, with the folders that it needs, and say so."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"saved {path}")
