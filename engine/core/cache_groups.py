"""Which part of the past a layer keeps. All that policy knows of the kinds of attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same part of the past, and therefore have one block table in common."""

    window: int = 0  # how many tokens a query attends to, its own included; 0: all

    def first_needed(self, position: int) -> int:
        """The position of the first token that the query at `position`, and every later one, may still read."""
        return max(position + 1 - self.window, 0) if self.window else 0


FULL = CacheGroup()
