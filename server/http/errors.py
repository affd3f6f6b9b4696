"""What went wrong, as OpenAI's and Anthropic's clients read it. Knows HTTP statuses and validation errors; no endpoints."""

from __future__ import annotations

import logging
import string
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

_log = logging.getLogger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_INTERNAL = "The server failed at this request; its log says why."


_IDENTIFIER = string.ascii_letters + string.digits + "_"


class APIError(Exception):
    """An answer that is not a success. `param` names the request's field that is to blame, where there is one."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def body(self) -> bytes:
        """The JSON object, for a response or for an event of a stream."""
        name = _TYPES.get(self.status)
        if name is None:
            name = (
                "InternalServerError"
                if self.status >= 500
                else HTTPStatus(self.status).phrase.replace(" ", "") + "Error"
            )
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": name, "param": self.param, "code": self.status}}
        )

    def anthropic_body(self) -> bytes:
        """The same in Anthropic's shape."""
        name = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": name, "message": self.message}})

    def renamed(self, names: Mapping[str, str]) -> APIError:
        """The same in the words of another API: `names` maps our fields to theirs."""
        if self.param is None:
            return self
        name = self.param[: len(self.param) - len(self.param.lstrip(_IDENTIFIER))]
        if name not in names:
            return self
        param = names[name] + self.param.removeprefix(name)
        message = self.message
        if message.startswith(self.param):
            message = param + message.removeprefix(self.param)
        return APIError(self.status, message, param)

    def response(self, path: str = "") -> Response:
        """In the shape that clients of this path read."""
        body = self.anthropic_body() if is_anthropic(path) else self.body()
        return Response(body, self.status, media_type="application/json")


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's API."""
    return path.rpartition("/v1/")[2].partition("/")[0] == "messages"


def bad_value(error: ValueError, renamed: Mapping[str, str]) -> APIError:
    """400 for the engine's `ValueError`, whose message begins with the name of what is wrong.

    `renamed`: what the request calls something that the engine calls otherwise.
    """
    word, _, rest = str(error).partition(" ")
    name = word.removesuffix(":")
    if not name.isidentifier() or not rest:
        return APIError(400, str(error))
    name = renamed.get(name, name)
    return APIError(400, f"{name}{':' if word.endswith(':') else ''} {rest}", name)


def unexpected(error: Exception) -> APIError:
    """500 for an error that is the server's own; it is logged here."""
    _log.error("a request failed", exc_info=error)
    return APIError(500, _INTERNAL)


def add_error_handlers(app: FastAPI) -> None:
    """Every error leaves `app` in one shape."""

    @app.exception_handler(APIError)
    async def api_error(request: Request, error: APIError) -> Response:
        return error.response(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return from_validation(error.errors()).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = error.detail
        if error.status_code in (404, 405):
            message = f"{error.detail}: {request.method} {request.url.path}"
        response = APIError(error.status_code, message).response(request.url.path)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return APIError(500, _INTERNAL).response(request.url.path)  # starlette logs it


def from_validation(errors: Sequence[Any]) -> APIError:
    """400 that names the first field which is wrong, in words."""
    error = errors[0]
    location = [part for part in error["loc"] if not str(part).startswith("<")]  # which member of a union it is
    if location[:1] in (["body"], ["query"], ["path"]):
        del location[0]
    message, given = error["msg"].removeprefix("Value error, "), error.get("input")
    match error["type"]:
        case "missing" if not location:
            return APIError(400, "the body is empty: it must be a JSON object")
        case "missing":
            message = "is required"
        case "extra_forbidden":
            message = "is not a field of this request"
        case "too_short" if not given:
            message = "must not be empty"
        case "wrong_field":  # found by looking at several fields together
            return APIError(400, message, error["ctx"]["field"])
        case "unsupported":
            pass
        case _ if not location:
            message = "the body must be a JSON object, sent with the header Content-Type: application/json"
        case _:
            message = f"{message}, got {_shown(given)}"
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".") or None
    return APIError(400, f"{param}: {message}" if param else message, param)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"
