"""The error for a model that cannot be used."""

from __future__ import annotations

from engine.utils.one_line import one_line


class ModelError(Exception):
    """A model cannot be used. The message is one line: which file or tensor, what is wrong, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))
