"""Warnings about fields of a request that have no effect. With --strict, such fields are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from server.http.bodies import Body
from server.http.errors import APIError, Names, field_name

MAX_WARNINGS = 20
MAX_SHOWN = 100  # characters of a field's name
MAX_HEADER_LENGTH = 1000
HEADER = "X-Quire-Warnings"


class Warnings:
    """The fields of a request that have no effect."""

    def __init__(self, strict: bool) -> None:
        """`strict`: refuse such fields."""
        self._strict = strict
        self.messages: list[str] = []

    def add(self, reason: str, *path: str | int, names: Names | None = None) -> None:
        """Add a warning. `names`: see `field_name`. Raises `APIError` if `strict`."""
        name = field_name(path, names or {})
        name = name if len(name) <= MAX_SHOWN else name[:MAX_SHOWN] + "…"
        if self._strict:
            raise APIError(400, reason, name)
        if len(self.messages) < MAX_WARNINGS:
            self.messages.append(f"{name}: {reason}")

    def add_fields(self, body: Body) -> Warnings:
        """Add a warning for each field of `body` that is unknown or has no effect."""
        for path, reason in _fields_without_effect(body):
            self.add(reason, *path)
            if len(self.messages) == MAX_WARNINGS:
                break
        return self

    @property
    def headers(self) -> dict[str, str]:
        """The response header, a JSON list in ASCII."""
        shown = list(self.messages)
        while len(text := json.dumps(shown)) > MAX_HEADER_LENGTH:  # proxies limit headers to a few KB
            shown = [*shown[: (len(shown) - 1) * 3 // 4], "… (`warnings` in the answer has all of them)"]
        return {HEADER: text} if shown else {}

    def as_dict(self) -> dict[str, list[str]]:
        """The member of the response's JSON object."""
        return {"warnings": self.messages} if self.messages else {}

    @property
    def member(self) -> bytes:
        """The member as JSON bytes with a leading comma, or nothing."""
        return b',"warnings":' + msgspec.json.encode(self.messages) if self.messages else b""


def _fields_without_effect(body: Body, *above: str | int) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if not body.NAMES_UNKNOWN:
        return
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            yield (*above, name), "is not a field of this request; ignored"
    given = body.model_fields_set
    for name, silent in body.NO_EFFECT.items():
        if silent is None or name not in given:
            continue
        value = getattr(body, name)
        if value is not None and value not in silent:
            yield (*above, name), "has no effect here"
    for name in [name for name in type(body).model_fields if name in given]:
        value = getattr(body, name)
        if isinstance(value, Body):
            yield from _fields_without_effect(value, *above, name)
        elif isinstance(value, list) and value and isinstance(value[0], Body | str):
            # `documents` may be strings or objects.
            for index, item in enumerate(value):
                if type(item) is not str and isinstance(item, Body):
                    yield from _fields_without_effect(item, *above, name, index)
