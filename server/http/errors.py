"""Errors as HTTP responses: one exception class, and the format of each API."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from engine.errors import ParameterError
from engine.utils.log import traceback_without_text
from server.http.context import CURRENT

_log = logging.getLogger(__name__)
_INTERNAL = "The server failed at this request; its log says why."

Names = Mapping[str, str]  # see `field_name`


class APIError(Exception):
    """An error response to a request.

    `path`: names and indexes that lead to the invalid field of the request; empty if there is none. `lead`: text between the
    field's name and `reason` in the message; None: `reason` is the whole message. `headers`: of the response. `details`:
    machine-readable details, for APIs whose errors have them.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        *path: str | int,
        lead: str | None = ": ",
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(reason)
        self.status, self.reason, self.path, self.lead = status, reason, path, lead
        self.headers, self.details = headers or {}, details
        self.param = field_name(path, {}) or None

    def spelled(self, names: Names) -> APIError:
        """Return a copy that uses an API's names of fields."""
        error = APIError(
            self.status, self.reason, *self.path, lead=self.lead, headers=self.headers, details=self.details
        )
        error.param = field_name(self.path, names) or None
        return error

    @property
    def message(self) -> str:
        return self.reason if self.param is None or self.lead is None else f"{self.param}{self.lead}{self.reason}"


def field_name(path: Sequence[str | int], names: Names) -> str:
    """Return an API's name of a field of the neutral request: `a[0].b`, unless `names` has another name for it.

    A key of `names` is a field with `[]` for every index, and also stands for all fields below it. Each `[]` in its value is
    filled with an index of the path.
    """
    for end in range(len(path), 0, -1):
        if (name := names.get(_joined(["" if isinstance(part, int) else part for part in path[:end]]))) is not None:
            head, *rest = name.split("[]")
            indexes = [part for part in path if isinstance(part, int)]
            return head + "".join(f"[{index}]{text}" for index, text in zip(indexes, rest, strict=False))
    return _joined(path)


def _joined(path: Sequence[str | int]) -> str:
    """Join a path. An empty part stands for any index."""
    parts = (f".{part}" if isinstance(part, str) and part else f"[{part}]" for part in path)
    return "".join(parts).removeprefix(".")


@contextmanager
def spelled(names: Names) -> Iterator[None]:
    """Convert the names of fields in errors of the block to an API's names."""
    try:
        yield
    except APIError as error:
        raise error.spelled(names) from None


def invalid(error: ValueError) -> APIError:
    """Return a 400 for an error of the engine's checks."""
    if isinstance(error, ParameterError):
        return APIError(400, error.reason, *error.path, lead=error.lead)
    return APIError(400, str(error))


def unexpected(error: BaseException) -> APIError:
    """Log an internal error and return a 500 for it."""
    _log.error("a request failed: %s", traceback_without_text(error))
    _log.debug("a request failed", exc_info=error)
    return APIError(500, _INTERNAL)


# ---- responses ----

ErrorBody = Callable[[APIError], bytes]  # encodes an error as JSON


class ErrorFormats:
    """The error format of each path."""

    def __init__(self, default: ErrorBody, below: Mapping[str, ErrorBody]) -> None:
        """`below`: formats of paths such as /v1/messages and all paths below them; `default`: of all other paths."""
        self._default, self._below = default, below

    def body(self, error: APIError, path: str) -> bytes:
        """Encode an error. `path`: of the request, possibly with a prefix that a proxy added."""
        return next((body for prefix, body in self._below.items() if _is_below(path, prefix)), self._default)(error)

    def has_own(self, path: str) -> bool:
        """Whether this path has another error format than the default."""
        return any(_is_below(path, prefix) for prefix in self._below)

    def response(self, error: APIError, path: str) -> Response:
        return Response(self.body(error, path), error.status, error.headers, "application/json")


def _is_below(path: str, prefix: str) -> bool:
    return f"{prefix}/" in f"{path}/"


def add_error_handlers(app: FastAPI, formats: ErrorFormats) -> None:
    """Make `app` return every error in the format of its path."""

    def response(request: Request, error: APIError) -> Response:
        return formats.response(error, request.url.path)

    @app.exception_handler(APIError)
    async def api_error(request: Request, error: APIError) -> Response:
        return response(request, error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return response(request, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = error.detail
        if error.status_code in (404, 405):
            message = f"{error.detail}: {request.method} {request.url.path}"
        answer = response(request, APIError(error.status_code, message))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        answer = response(request, APIError(500, _INTERNAL))  # uvicorn logs it
        if (context := CURRENT.get()) is not None:  # this response bypasses the middleware
            answer.raw_headers.extend(context.headers)
        return answer


def from_validation(errors: Sequence[Any]) -> APIError:
    """Return a 400 that names the first invalid field."""
    error = errors[0]
    path = [part for part in error["loc"] if not str(part).startswith("<")]  # members of unions
    if path[:1] in (["body"], ["query"], ["path"]):
        del path[0]
    reason, given = error["msg"].removeprefix("Value error, "), error.get("input")
    match error["type"]:
        case "missing" if not path:
            return APIError(400, "the body is empty: it must be a JSON object")
        case "missing":
            reason = "is required"
        case "extra_forbidden":
            reason = "is not a field of this request"
        case "too_short" if not given:
            reason = "must not be empty"
        case "too_long":
            reason = f"must have at most {error['ctx']['max_length']} entries"
        case "wrong_field":  # raised by checks of several fields
            return APIError(400, error["ctx"]["reason"], *error["ctx"]["path"])
        case "unsupported":
            pass
        case _ if not path:
            reason = "the body must be a JSON object"
        case "model_type":
            reason = f"must be an object, got {_shown(given)}"
        case _:
            reason = f"{reason}, got {_shown(given)}"
    return APIError(400, reason, *path)


def _shown(value: Any) -> str:
    text = _brief.repr(value)
    return text if len(text) <= 100 else text[:100] + "…"


_brief = reprlib.Repr()  # abbreviates long values
_brief.maxstring = _brief.maxother = 200
_brief.maxlist = _brief.maxdict = 40
