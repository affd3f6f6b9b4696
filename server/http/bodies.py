"""Request bodies: strict types, unsupported fields and fields without effect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from server.generation.warnings import Warnings

NOT_SUPPORTED = "Not supported yet."
WITHOUT_EFFECT = "Accepted; has no effect."

Table = Mapping[str, tuple[Any, ...]]


def _adapted(schema: Any) -> Any:
    """Return the schema with two changes: validation of a list stops at its first invalid entry, since lists may be
    long, and integers outside lists may be written as 4.0.
    """
    if isinstance(schema, list):
        return [_adapted(each) for each in schema]
    if not isinstance(schema, dict) or schema.get("type") == "function-before":
        return schema
    match schema.get("type"):
        case "list":
            return _failing_fast(schema)
        case "int":
            return core_schema.no_info_before_validator_function(_integral, cast(CoreSchema, schema))
    return {key: _adapted(value) for key, value in schema.items()}


def _failing_fast(schema: Any) -> Any:
    if isinstance(schema, dict):
        fast = {"fail_fast": True} if schema.get("type") == "list" else {}
        return {key: _failing_fast(value) for key, value in schema.items()} | fast
    if isinstance(schema, list):
        return [_failing_fast(each) for each in schema]
    return schema


def _integral(value: Any) -> Any:
    """Convert integral floats, since JSON has only one type of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Body(BaseModel):
    """A JSON object in a request. Types are not converted. Unknown fields are kept for warnings only."""

    model_config = ConfigDict(strict=True, extra="allow")

    # Known fields without effect → values that need no warning; None: no value needs one.
    NO_EFFECT: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {}
    # Whether unknown fields cause warnings.
    NAMES_UNKNOWN: ClassVar[bool] = True

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _adapted(handler(source))
        return schema


def optional(description: str, default: Any = None, **more: Any) -> Any:
    """Declare an optional field. `default`: its documented default. `more`: arguments of pydantic's `Field`."""
    extra = more.pop("json_schema_extra", {}) | ({} if default is None else {"default": default})
    return Field(None, description=description, json_schema_extra=extra, **more)


# A JSON schema of a tool's arguments, which may be unsound: see server/generation/tool_schemas.py.
ArgumentsSchema = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": True}, {"type": "null"}]})
]


def unsupported(neutral: tuple[Any, ...]) -> Any:
    """Declare an unsupported field that would change the answer. Accepts only null and `neutral` values, which change
    nothing.
    """

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
    return Annotated[Any, WrapValidator(check), kind], Field(None, description=NOT_SUPPORTED)


def unsupported_fields(*tables: Table) -> dict[str, Any]:
    """Declare unsupported fields for `pydantic.create_model`."""
    return {name: unsupported(neutral) for table in tables for name, neutral in table.items()}


def fields_without_effect(names: Mapping[str, Any]) -> dict[str, Any]:
    """Declare fields without effect for `pydantic.create_model`."""
    return {name: (Any, Field(None, description=WITHOUT_EFFECT)) for name in names}


def one_message(text: str) -> WrapValidator:
    """Give a union one error message instead of one for each member: the value must be `text`."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("wrong_value", "must be " + text) from None  # type: ignore[arg-type]

    return WrapValidator(check)


def wrong(reason: str, *path: str | int) -> PydanticCustomError:
    """Return an error at the field `path`, for checks that involve several fields."""
    return PydanticCustomError("wrong_field", "{reason}", {"reason": reason, "path": path})


def warnings_about(body: Body, strict: bool) -> Warnings:
    """Return a warning for each field of `body` that is unknown or has no effect. `strict`: see `Warnings`."""
    warnings = Warnings(strict)
    for path, reason in _fields_to_warn_of(body):
        warnings.add(reason, *path)
        if warnings.is_full:
            break
    return warnings


def _fields_to_warn_of(body: Body, *above: str | int) -> Iterator[tuple[tuple[str | int, ...], str]]:
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
            yield from _fields_to_warn_of(value, *above, name)
        elif isinstance(value, list) and value and isinstance(value[0], Body | str):
            # `documents` may be strings or objects.
            for index, item in enumerate(value):
                if type(item) is not str and isinstance(item, Body):
                    yield from _fields_to_warn_of(item, *above, name, index)
