"""Errors as Ollama's clients read them: as a body, and as the last line of a stream."""

from __future__ import annotations

import msgspec

from server.http.errors import APIError

ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def error_body(error: APIError) -> bytes:
    """The JSON object of an error."""
    return msgspec.json.encode({"error": error.message})


def failure(error: APIError) -> bytes:
    """The line of an error."""
    return error_body(error) + b"\n"
