"""Errors as OpenAI's clients read them: as a body, and as the last event of a stream."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from server.http.errors import APIError
from server.http.sse import event

DONE = b"data: [DONE]\n\n"  # how streams end, but for those of /v1/responses
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    429: "RateLimitError",
    422: "UnprocessableEntityError",
    499: "ClientClosedRequestError",  # unread, but for logs
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "description": "Where a key is missing, only a text.",
            "anyOf": [
                {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"], "description": "the field that is to blame"},
                        "code": {
                            "type": ["integer", "string"],
                            "description": "the HTTP status; `rate_limit_exceeded` instead of 429",
                        },
                    },
                },
                {"type": "string"},
            ],
        }
    },
}


def error_body(error: APIError) -> bytes:
    """The JSON object of an error."""
    status = error.status
    name = _TYPES.get(status)
    if name is None:
        name = "InternalServerError" if status >= 500 else HTTPStatus(status).phrase.replace(" ", "") + "Error"
    code = "rate_limit_exceeded" if status == 429 else status  # what OpenAI's clients ask for
    return msgspec.json.encode({"error": {"message": error.message, "type": name, "param": error.param, "code": code}})


def failure(error: APIError) -> bytes:
    """The event of an error."""
    return event(error_body(error))
