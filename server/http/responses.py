"""Answers as HTTP responses: whole, as a stream, or cut off because the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from fastapi import Request, Response

from server.http.errors import APIError
from server.http.sse import EventStream
from server.http.warnings import Warnings

_CLIENT_CLOSED = 499


def streamed(
    events: AsyncGenerator[bytes, None],
    warnings: Warnings,
    *,
    failure: Callable[[APIError], bytes],
    end: bytes,
    keep_alive: float,
) -> Response:
    """`failure`: the event of an error; `end`: what comes last; `keep_alive`: as of `EventStream`."""
    response = EventStream(events, failure=failure, end=end, keep_alive=keep_alive)
    response.headers.update(warnings.headers)
    return response


async def whole(request: Request, answer: Coroutine[Any, Any, bytes], warnings: Warnings) -> Response:
    """The answer's JSON; nothing when the client hangs up before it is complete, which cancels it."""
    working = asyncio.create_task(answer)
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return Response(working.result(), media_type="application/json", headers=warnings.headers)
        return Response(status_code=_CLIENT_CLOSED)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
