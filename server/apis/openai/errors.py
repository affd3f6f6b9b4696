"""Errors in OpenAI's format: as a response body, and as the last event of a stream."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from server.http.errors import APIError
from server.http.sse import event

DONE = b"data: [DONE]\n\n"  # ends every stream except those of /v1/responses
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    429: "RateLimitError",
    422: "UnprocessableEntityError",
    499: "ClientClosedRequestError",  # the client is gone; appears only in logs
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "description": "A plain string if the API key is missing.",
            "anyOf": [
                {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"], "description": "the request field at fault"},
                        "code": {
                            "type": ["integer", "string"],
                            "description": "the HTTP status, but `rate_limit_exceeded` instead of 429",
                        },
                    },
                },
                {"type": "string"},
            ],
        }
    },
}


def error_body(error: APIError) -> bytes:
    """Return the error as a JSON object."""
    status = error.status
    name = _TYPES.get(status)
    if name is None:
        name = "InternalServerError" if status >= 500 else HTTPStatus(status).phrase.replace(" ", "") + "Error"
    code = "rate_limit_exceeded" if status == 429 else status  # the code that OpenAI's clients check for
    return msgspec.json.encode({"error": {"message": error.message, "type": name, "param": error.param, "code": code}})


def failure(error: APIError) -> bytes:
    """Return the error as a server-sent event."""
    return event(error_body(error))
