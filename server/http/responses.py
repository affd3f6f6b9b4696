"""HTTP responses: complete or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

import msgspec
from fastapi import Response

from server.http.errors import APIError
from server.http.sse import EVENTS, EventStream
from server.http.warnings import Warnings


def streamed(
    events: AsyncGenerator[bytes, None],
    warnings: Warnings,
    *,
    failure: Callable[[APIError], bytes],
    end: bytes,
    keep_alive: float,
    media_type: str = EVENTS,
) -> Response:
    """Return a streaming response. `failure`: makes the event of an error; `end`: the last bytes; others: see `EventStream`."""
    response = EventStream(events, failure=failure, end=end, keep_alive=keep_alive, media_type=media_type)
    response.headers.update(warnings.headers)
    return response


async def whole(answer: Coroutine[Any, Any, bytes], warnings: Warnings) -> Response:
    """Return a complete response. `answer`: its JSON, including the warnings."""
    return Response(await answer, media_type="application/json", headers=warnings.headers)


def json_response(members: Mapping[str, Any], warnings: Warnings) -> Response:
    """Return a JSON object with the warnings."""
    content = msgspec.json.encode({**members, **warnings.as_dict()})
    return Response(content, media_type="application/json", headers=warnings.headers)
