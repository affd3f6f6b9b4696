"""Types arguments that a model writes as plain text, by the tool's JSON Schema."""

from __future__ import annotations

import ast
import json
from typing import Any

from engine.structured.kinds import kind_of

_MAX_LITERAL = 100_000  # characters that are parsed as a Python literal


def as_json(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of an argument that the model wrote as `text`.

    A text that is JSON of an allowed type, except for strings, is that; else it is a string where strings are allowed.
    """
    if kinds == {"string"}:
        return dumped(text)
    bare = text.strip()
    found = _parsed(bare)
    if found is not _NONE and kind_of(found) in kinds and (not isinstance(found, str) or "string" not in kinds):
        return bare
    if not bare.startswith(('"', "'")) and (literal := _literal(bare)) is not _NONE and kind_of(literal) in kinds:
        return dumped(literal)
    if "string" in kinds or found is _NONE:
        return dumped(text)
    return bare


def is_complete(text: str) -> bool:
    """Return whether a text is a whole JSON value or Python literal."""
    text = text.strip()
    return _parsed(text) is not _NONE or _literal(text) is not _NONE


def dumped(value: Any) -> str:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False)


_NONE = object()


def _parsed(text: str) -> Any:
    try:
        found = json.loads(text, parse_constant=_refuse)
        dumped(found).encode()  # JSON responses cannot contain a lone surrogate
    except (ValueError, RecursionError):
        return _NONE
    return found


def _literal(text: str) -> Any:
    """Return the value of a Python literal, as templates write objects: `{'a': None}`."""
    if len(text) > _MAX_LITERAL or not (text.startswith(("{", "[")) or text in ("True", "False", "None")):
        return _NONE
    try:
        found = ast.literal_eval(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NONE
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
