"""Request bodies: strict JSON, strict types, fields that are not supported and fields without effect."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

_decode = msgspec.json.decode
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

NOT_SUPPORTED = "Not supported yet."
WITHOUT_EFFECT = "Accepted; has no effect."

Table = Mapping[str, tuple[Any, ...]]


class Body(BaseModel):
    """A JSON object of a request. No conversions between types; unknown fields are kept for warnings, and not used."""

    model_config = ConfigDict(strict=True, extra="allow")

    # Known fields without effect, and their values that need no warning. None: none needs one.
    NO_EFFECT: ClassVar[Mapping[str, tuple[Any, ...] | None]] = {}
    # Whether unknown fields are warned of.
    NAMES_UNKNOWN: ClassVar[bool] = True


def optional(description: str, default: Any = None, **more: Any) -> Any:
    """A field that may be left out. `default`: what that means, for documentation. `more`: as of pydantic's `Field`."""
    extra = more.pop("json_schema_extra", {}) | ({} if default is None else {"default": default})
    return Field(None, description=description, json_schema_extra=extra, **more)


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
    return Annotated[Any, WrapValidator(check), kind], Field(None, description=NOT_SUPPORTED)


def unsupported_fields(*tables: Table) -> dict[str, Any]:
    """For `pydantic.create_model`."""
    return {name: unsupported(neutral) for table in tables for name, neutral in table.items()}


def fields_without_effect(names: Mapping[str, Any]) -> dict[str, Any]:
    """For `pydantic.create_model`."""
    return {name: (Any, Field(None, description=WITHOUT_EFFECT)) for name in names}


def one_message(text: str) -> WrapValidator:
    """For unions: one error in plain words instead of one for each member."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("wrong_value", "must be " + text) from None  # type: ignore[arg-type]

    return WrapValidator(check)


def wrong(reason: str, *path: str | int) -> PydanticCustomError:
    """An error that a check of several fields finds in the one at `path`."""
    return PydanticCustomError("wrong_field", "{reason}", {"reason": reason, "path": path})


class StrictJSONRoute(APIRoute):
    """Reads bodies as RFC 8259 has them, in UTF-8: NaN, halves of surrogate pairs and numbers beyond a double are 400.

    So whatever a request holds can be written into an answer again. An endpoint that takes `body` and `request`, and
    returns a response, gets a valid body without the framework's search for other parameters; all else is left to that.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, endpoint = super().get_route_handler(), self.endpoint
        body_type = None
        if list(inspect.signature(endpoint).parameters) == ["body", "request"]:
            body_type = TypeAdapter(typing.get_type_hints(endpoint, include_extras=True)["body"])

        async def handle_strictly(request: Request) -> Response:
            request = _StrictRequest(request.scope, request.receive)
            if body_type is not None and request.headers.get("content-type") == "application/json":
                try:
                    body = body_type.validate_python(await request.json())
                except Exception:
                    return await handle(request)  # which says what is wrong
                response: Response = await endpoint(body=body, request=request)
                return response
            return await handle(request)

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        body = (await self.body()).removeprefix(_BYTE_ORDER_MARK)
        try:
            return _decode(body)
        except UnicodeDecodeError as error:
            reason = f"it must be UTF-8 ({error.reason} at byte {error.start})"
        except RecursionError:
            reason = "it is nested too deeply"
        except msgspec.DecodeError as error:
            reason = str(error).removeprefix("JSON is malformed: ")
        raise HTTPException(400, f"the body is not valid JSON: {reason}")
