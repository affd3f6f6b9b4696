"""Facts about Quire, about serving language models, and about the demo model itself: texts/quire.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo.tables import load


@dataclass(frozen=True)
class Topic:
    """A term. Each answer is for another question: see texts/quire.yaml."""

    names: str
    what: tuple[str, ...]
    short: str
    more: str
    how: str = ""
    why: str = ""

    @classmethod
    def of(cls, row: dict[str, Any]) -> Topic:
        return cls(**row | {"what": tuple(row["what"])})


_tables = load("quire")
TOPICS = [Topic.of(row) for row in _tables["topics"]]
QUESTIONS: list[tuple[str, list[str], str]] = _tables["questions"]
SELF: list[tuple[str, list[str], str]] = _tables["self"]
