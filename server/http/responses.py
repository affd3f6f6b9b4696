"""HTTP responses: complete or streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

import msgspec
from fastapi import Response

from server.generation.warnings import Warnings
from server.http.errors import APIError
from server.http.sse import EVENTS, EventStream

MAX_HEADER_LENGTH = 1000
HEADER = "X-Quire-Warnings"


def warning_headers(warnings: Warnings) -> dict[str, str]:
    """Return the response header of the warnings: a JSON list in ASCII."""
    shown = list(warnings.messages)
    while len(text := json.dumps(shown)) > MAX_HEADER_LENGTH:  # proxies limit headers to a few KB
        shown = [*shown[: (len(shown) - 1) * 3 // 4], "… (`warnings` in the answer has all of them)"]
    return {HEADER: text} if shown else {}


def streamed(
    events: AsyncGenerator[bytes, None],
    warnings: Warnings,
    *,
    failure: Callable[[APIError], bytes],
    end: bytes,
    keep_alive: float,
    media_type: str = EVENTS,
) -> Response:
    """Return a streaming response. `failure`: makes the event of an error; `end`: the last bytes; others: see
    `EventStream`.
    """
    response = EventStream(events, failure=failure, end=end, keep_alive=keep_alive, media_type=media_type)
    response.headers.update(warning_headers(warnings))
    return response


async def whole(answer: Coroutine[Any, Any, bytes], warnings: Warnings) -> Response:
    """Return a complete response. `answer`: its JSON, including the warnings."""
    return Response(await answer, media_type="application/json", headers=warning_headers(warnings))


def json_response(members: Mapping[str, Any], warnings: Warnings) -> Response:
    """Return a JSON object with the warnings."""
    content = msgspec.json.encode({**members, **warnings.as_dict()})
    return Response(content, media_type="application/json", headers=warning_headers(warnings))
