"""How whatever takes long at start-up says how far it is."""

from __future__ import annotations

from collections.abc import Callable

# (phase, done, total): a phase of `engine.state`, and how much of it is done, in any unit; 0 of 0 where that is not known.
Progress = Callable[[str, int, int], None]


def silent(phase: str, done: int, total: int) -> None:
    """For callers that do not want to know."""
