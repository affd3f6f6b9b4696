"""Errors in Anthropic's format: as a response body, and as the last event of a stream."""

from __future__ import annotations

import msgspec

from server.http.errors import APIError
from server.http.sse import event

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def error_body(error: APIError) -> bytes:
    """Return the error as a JSON object."""
    name = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"details": error.details} if error.details is not None else {}
    return msgspec.json.encode({"type": "error", "error": {"type": name, "message": error.message, **details}})


def failure(error: APIError) -> bytes:
    """Return the error as a server-sent event."""
    return event(error_body(error), b"error")
