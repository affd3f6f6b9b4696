"""Errors as HTTP answers: one exception for all of them, and the shape that each API's clients read."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from engine.log import traceback_without_text
from server.http.context import CURRENT

_log = logging.getLogger(__name__)
_INTERNAL = "The server failed at this request; its log says why."

Names = Mapping[str, str]  # see `field_name`


class APIError(Exception):
    """A request that is not answered as asked.

    `path` leads to the field of the request that is to blame: names and indexes; empty when there is none. `lead` stands
    between its name and `reason` in the message; None: `reason` is the whole message. `headers`: for the response.
    `details`: for programs, where the API's errors have such.
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
        """The same with the field as an API calls it."""
        error = APIError(
            self.status, self.reason, *self.path, lead=self.lead, headers=self.headers, details=self.details
        )
        error.param = field_name(self.path, names) or None
        return error

    @property
    def message(self) -> str:
        return self.reason if self.param is None or self.lead is None else f"{self.param}{self.lead}{self.reason}"


def field_name(path: Sequence[str | int], names: Names) -> str:
    """A field of the neutral request as an API calls it: `a[0].b`, unless `names` has another name for it.

    A key of `names` is such a field with `[]` for every index, and stands for all fields below it, too; the `[]` of its
    value are filled with the indexes of the path.
    """
    for end in range(len(path), 0, -1):
        if (name := names.get(_joined(["" if isinstance(part, int) else part for part in path[:end]]))) is not None:
            head, *rest = name.split("[]")
            indexes = [part for part in path if isinstance(part, int)]
            return head + "".join(f"[{index}]{text}" for index, text in zip(indexes, rest, strict=False))
    return _joined(path)


def _joined(path: Sequence[str | int]) -> str:
    """An empty part is any index."""
    parts = (f".{part}" if isinstance(part, str) and part else f"[{part}]" for part in path)
    return "".join(parts).removeprefix(".")


@contextmanager
def spelled(names: Names) -> Iterator[None]:
    """Errors that leave the block call fields as an API does."""
    try:
        yield
    except APIError as error:
        raise error.spelled(names) from None


def engine_error(error: ValueError, fields: Mapping[str, tuple[str, ...]]) -> APIError:
    """400 for a `ValueError` of the engine, whose message begins with the name of the parameter that is wrong.

    `fields`: the names that are parameters, each with its path in the request.
    """
    word, _, reason = str(error).partition(" ")
    name = word.removesuffix(":")
    if name not in fields:
        return APIError(400, str(error))
    return APIError(400, reason, *fields[name], lead=": " if word.endswith(":") else " ")


def unexpected(error: BaseException) -> APIError:
    """500 for an error that is the server's own; it is logged here."""
    _log.error("a request failed: %s", traceback_without_text(error))
    _log.debug("a request failed", exc_info=error)
    return APIError(500, _INTERNAL)


# ---- the answers ----

ErrorBody = Callable[[APIError], bytes]  # the JSON object of an error


class ErrorFormats:
    """The shape of errors below each path."""

    def __init__(self, default: ErrorBody, below: Mapping[str, ErrorBody]) -> None:
        """`below`: paths such as /v1/messages, whose endpoints and those below have another shape."""
        self._default, self._below = default, below

    def body(self, error: APIError, path: str) -> bytes:
        """`path`: of the request; a proxy may have put something before it."""
        return next((body for prefix, body in self._below.items() if _is_below(path, prefix)), self._default)(error)

    def has_own(self, path: str) -> bool:
        """Whether errors of this path have a shape other than the default."""
        return any(_is_below(path, prefix) for prefix in self._below)

    def response(self, error: APIError, path: str) -> Response:
        return Response(self.body(error, path), error.status, error.headers, "application/json")


def _is_below(path: str, prefix: str) -> bool:
    return f"{prefix}/" in f"{path}/"


def add_error_handlers(app: FastAPI, formats: ErrorFormats) -> None:
    """Every error leaves `app` in the shape that its path's clients read."""

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
        if (context := CURRENT.get()) is not None:  # no middleware sees this response
            answer.raw_headers.extend(context.headers)
        return answer


def from_validation(errors: Sequence[Any]) -> APIError:
    """400 that names the first field which is wrong, in words."""
    error = errors[0]
    path = [part for part in error["loc"] if not str(part).startswith("<")]  # which member of a union it is
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
        case "wrong_field":  # found by looking at several fields together
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


_brief = reprlib.Repr()  # does not write out a million entries
_brief.maxstring = _brief.maxother = 200
_brief.maxlist = _brief.maxdict = 40
