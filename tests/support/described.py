"""Answers held against the types that a vendor's client has for them: what is missing, and what is there in
addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter


def additions(kind: Any, value: Any) -> set[str]:
    """Fields of a JSON value that its description does not have: `Model.field`. `ValidationError` for what is wrong."""
    return set(_extra(_adapter(kind).validate_python(value)))


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _extra(parsed: Any) -> Iterator[str]:
    if isinstance(parsed, BaseModel):
        yield from (f"{type(parsed).__name__}.{name}" for name in parsed.model_extra or ())
        for name in type(parsed).model_fields:
            yield from _extra(getattr(parsed, name))
    elif isinstance(parsed, dict):
        for each in parsed.values():
            yield from _extra(each)
    elif isinstance(parsed, list):
        for each in parsed:
            yield from _extra(each)
