"""Errors as HTTP responses: the status of each, and the format of each API."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from engine.utils.log import traceback_without_text
from server.generation.errors import (
    BusyError,
    ConflictError,
    EngineFailedError,
    InvalidRequestError,
    NotFoundError,
    NotPermittedError,
    RateLimitError,
    RequestError,
    TimedOutError,
    UnavailableError,
)
from server.observability.context import CURRENT

_log = logging.getLogger(__name__)
_INTERNAL = "The server failed at this request; its log says why."


class APIError(RequestError):
    """An error response to a request. `headers`: of the response; others: see `RequestError`."""

    def __init__(
        self,
        status: int,
        reason: str,
        *path: str | int,
        lead: str | None = ": ",
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(reason, *path, lead=lead, details=details)
        self.status, self.headers = status, headers or {}


STATUSES: dict[type[RequestError], int] = {
    InvalidRequestError: 400,
    NotPermittedError: 403,
    NotFoundError: 404,
    ConflictError: 409,
    RateLimitError: 429,
    EngineFailedError: 500,
    UnavailableError: 503,
    BusyError: 503,
    TimedOutError: 504,
}


def with_status(error: RequestError) -> APIError:
    """Return the response for an error."""
    if isinstance(error, APIError):
        return error
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, BusyError) else {}
    found = APIError(
        STATUSES[type(error)], error.reason, *error.path, lead=error.lead, headers=headers, details=error.details
    )
    found.param = error.param
    return found


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
        """Return true if this path has another error format than the default."""
        return any(_is_below(path, prefix) for prefix in self._below)

    def response(self, error: RequestError, path: str) -> Response:
        shown = with_status(error)
        return Response(self.body(shown, path), shown.status, shown.headers, "application/json")


def _is_below(path: str, prefix: str) -> bool:
    return f"{prefix}/" in f"{path}/"


def add_error_handlers(app: FastAPI, formats: ErrorFormats) -> None:
    """Make `app` return every error in the format of its path."""

    def response(request: Request, error: RequestError) -> Response:
        return formats.response(error, request.url.path)

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
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
