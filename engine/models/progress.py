"""Progress reporting of long start-up phases."""

from __future__ import annotations

from collections.abc import Callable

# (phase, done, total): a phase of `engine.state` and its progress in any unit; 0 of 0: unknown.
Progress = Callable[[str, int, int], None]


def silent(phase: str, done: int, total: int) -> None:
    """Ignore progress."""
