"""How answers leave the server: whole, as a stream, or not at all because the client has gone. Knows no endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from fastapi import Request, Response

from server.http import sse
from server.http.errors import APIError
from server.http.fields import Ignored
from server.settings import ServerConfig

_CLIENT_CLOSED = 499


def streamed(
    settings: ServerConfig,
    events: AsyncGenerator[bytes, None],
    ignored: Ignored,
    *,
    failure: Callable[[APIError], bytes] = sse.failure,
    end: bytes = sse.DONE,
) -> Response:
    """`failure`: the event of an error, `end`: what comes last."""
    response = sse.EventStream(events, failure=failure, end=end, keep_alive=settings.sse_keep_alive_interval)
    response.headers.update(ignored.headers)
    return response


async def whole(request: Request, answer: Coroutine[Any, Any, bytes], ignored: Ignored) -> Response:
    """The answer, or its end when the client hangs up before it is complete."""
    working = asyncio.create_task(answer)
    watching = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return Response(working.result(), media_type="application/json", headers=ignored.headers)
        return Response(status_code=_CLIENT_CLOSED)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
