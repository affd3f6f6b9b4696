"""Warnings about fields of a request that have no effect. With --strict, such fields are refused."""

from __future__ import annotations

import msgspec

from server.generation.errors import InvalidRequestError, Names, field_name

MAX_WARNINGS = 20
MAX_SHOWN = 100  # characters of a field's name


class Warnings:
    """The fields of a request that have no effect."""

    def __init__(self, strict: bool, names: Names | None = None, messages: list[str] | None = None) -> None:
        """`strict`: refuse such fields. `names`: see `field_name`. `messages`: a list that gets the warnings."""
        self._strict, self._names = strict, names or {}
        self.messages = messages if messages is not None else []

    def named(self, names: Names) -> Warnings:
        """Return an object that adds to the same warnings, for fields of the neutral request with these names."""
        return Warnings(self._strict, names, self.messages)

    @property
    def is_full(self) -> bool:
        return len(self.messages) >= MAX_WARNINGS

    def add(self, reason: str, *path: str | int) -> None:
        """Add a warning. Raises `InvalidRequestError` if `strict`."""
        name = field_name(path, self._names)
        name = name if len(name) <= MAX_SHOWN else name[:MAX_SHOWN] + "…"
        if self._strict:
            raise InvalidRequestError(reason, name)
        if not self.is_full:
            self.messages.append(f"{name}: {reason}")

    def as_dict(self) -> dict[str, list[str]]:
        """The member of the response's JSON object."""
        return {"warnings": self.messages} if self.messages else {}

    @property
    def member(self) -> bytes:
        """The member as JSON bytes with a leading comma, or nothing."""
        return b',"warnings":' + msgspec.json.encode(self.messages) if self.messages else b""
