"""Measurements as JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDTH = 120  # characters of a line


def save(result: Any, path: str | Path) -> None:
    """Write the file, with the folders that it needs, and say so."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_text(result), encoding="utf-8")
    print(f"saved {path}")


def to_text(result: Any) -> str:
    """Return JSON with as many values in a line as fit, so that a measurement is a line or a few."""
    return _lines(result, "") + "\n"


def _lines(value: Any, indent: str, key: str = "") -> str:
    """Return the JSON of a value after its key; further lines begin with `indent`."""
    text = json.dumps(value)
    if not isinstance(value, (dict, list)) or len(indent) + len(key) + len(text) + 2 <= WIDTH:
        return key + text
    inner = indent + " "
    if isinstance(value, dict):
        parts = [_lines(each, inner, f"{json.dumps(str(name))}: ") for name, each in value.items()]
    else:
        parts = [_lines(each, inner) for each in value]
    lines = [key + text[0] + parts[0]]
    is_list_of_records = isinstance(value, list) and any(isinstance(each, dict) for each in value)
    for part in parts[1:]:
        fits = len(inner) + len(lines[-1]) + len(part) + 4 <= WIDTH
        if indent and fits and not is_list_of_records and "\n" not in lines[-1] + part:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return f",\n{inner}".join(lines) + text[-1]
