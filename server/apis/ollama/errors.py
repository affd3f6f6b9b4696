"""Errors in Ollama's format: as a response body, and as the last line of a stream."""

from __future__ import annotations

import msgspec

from server.http.errors import APIError

ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def error_body(error: APIError) -> bytes:
    """Return the error as a JSON object."""
    return msgspec.json.encode({"error": error.message})


def failure(error: APIError) -> bytes:
    """Return the error as a line of JSON."""
    return error_body(error) + b"\n"
