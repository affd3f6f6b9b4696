"""What all request bodies share: strict types, fields that are not supported, fields that are ignored. Knows no API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

from server.http.errors import APIError

MAX_WARNINGS = 20
MAX_SHOWN = 100  # characters of a field's name
HEADER = "X-Quire-Warnings"

Table = Mapping[str, tuple[Any, ...]]


class Body(BaseModel):
    """A JSON object of a request. No conversions between types; unknown fields are kept to be told of, and not used."""

    model_config = ConfigDict(strict=True, extra="allow")

    # Known fields without effect, and the values of them that nobody needs to be told of. None: no value of it.
    NO_EFFECT: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {}
    # Whether to tell of unknown fields.
    NAMES_UNKNOWN: ClassVar[bool] = True


def unsupported(neutral: tuple[Any, ...]) -> Any:
    """A field that changes the answer and is not supported: only `neutral` values, which change nothing, and null."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        if value is None or any(
            value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral
        ):
            return None
        allowed = " or ".join(json.dumps(value) for value in (*neutral, None))
        raise PydanticCustomError(
            "unsupported", "is not supported yet (only {allowed}, which changes nothing)", {"allowed": allowed}
        )

    kind = WithJsonSchema({"enum": [*neutral, None]})
    return Annotated[Any, WrapValidator(check), kind], Field(None, description="Not supported yet.")


def unsupported_fields(*tables: Table) -> dict[str, Any]:
    """For `pydantic.create_model`."""
    return {name: unsupported(neutral) for table in tables for name, neutral in table.items()}


def fields_without_effect(names: Mapping[str, Any]) -> dict[str, Any]:
    """For `pydantic.create_model`."""
    return {name: (Any, Field(None, description="Accepted; has no effect.")) for name in names}


def one_message(text: str) -> WrapValidator:
    """For unions: one error in plain words instead of one for each member."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("wrong_value", "must be " + text) from None  # type: ignore[arg-type]

    return WrapValidator(check)


def wrong(field: str, message: str) -> PydanticCustomError:
    """An error that a check of several fields finds in `field`."""
    return PydanticCustomError("wrong_field", "{field}: {message}", {"field": field, "message": message})


class Ignored:
    """What of a request is ignored: said in the answer, or with `strict` refused."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self.warnings: list[str] = []

    def add(self, param: str, message: str) -> None:
        """`APIError` with `strict`."""
        param = param if len(param) <= MAX_SHOWN else param[:MAX_SHOWN] + "…"
        if self._strict:
            raise APIError(400, f"{param}: {message}", param)
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(f"{param}: {message}")

    def add_fields(self, body: Body) -> Ignored:
        """All fields of `body` that are unknown or have no effect."""
        for param, message in _ignored_fields(body, ""):
            self.add(param, message)
        return self

    @property
    def headers(self) -> dict[str, str]:
        """For the response: a JSON list in ASCII."""
        return {HEADER: json.dumps(self.warnings)} if self.warnings else {}

    def as_dict(self) -> dict[str, list[str]]:
        """For the response's JSON object."""
        return {"warnings": self.warnings} if self.warnings else {}

    @property
    def member(self) -> bytes:
        """The same as bytes: a comma and the list, or nothing."""
        return b',"warnings":' + msgspec.json.encode(self.warnings) if self.warnings else b""


def _ignored_fields(body: Body, path: str) -> Iterator[tuple[str, str]]:
    if not body.NAMES_UNKNOWN:
        return
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            yield path + name, "is not a field of this request; ignored"
    given = body.model_fields_set
    for name, silent in body.NO_EFFECT.items():
        if silent is None or name not in given:
            continue
        value = getattr(body, name)
        if value is not None and value not in silent:
            yield path + name, "has no effect here"
    for name in [name for name in type(body).model_fields if name in given]:
        value = getattr(body, name)
        if isinstance(value, Body):
            yield from _ignored_fields(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            for index, item in enumerate(value):
                yield from _ignored_fields(item, f"{path}{name}[{index}].")
