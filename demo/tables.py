"""Loader of the tables in demo/texts: all words and sentences that conversations are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

TEXTS = Path(__file__).parent / "texts"


def load(name: str) -> dict[str, Any]:
    """The tables of one file by name; rows are lists."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast, but not everywhere
    tables: dict[str, Any] = yaml.load((TEXTS / f"{name}.yaml").read_text(encoding="utf-8"), Loader=loader)
    return tables
