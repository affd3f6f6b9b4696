"""Server-sent events: JSON objects in, the bytes of a response out. Knows no model and no endpoint.

An event is `data: {json}` and an empty line; the last one is `data: [DONE]`, after an error as well.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from sse_starlette import EventSourceResponse, ServerSentEvent

from server.errors import APIError, unexpected

DONE = b"data: [DONE]\n\n"
_SHUTDOWN_MARGIN = 5.0  # seconds that a stream may take to say goodbye once its request has been ended


def event(json: bytes) -> bytes:
    return b"data: " + json + b"\n\n"


def stream(events: AsyncGenerator[bytes, None], *, keep_alive: float, shutdown_timeout: float) -> EventSourceResponse:
    """The response that sends `events` (each made by `event`), then `DONE`.

    When the client hangs up the task that waits for the next event is cancelled. `keep_alive`: seconds between comments
    while nothing else is sent; 0: none. `shutdown_timeout`: how long it may go on while the server stops.
    """
    return EventSourceResponse(
        _until_done(events),
        media_type="text/event-stream; charset=utf-8",
        ping=keep_alive,
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
        sep="\n",
        shutdown_grace_period=shutdown_timeout + _SHUTDOWN_MARGIN,
    )


async def _until_done(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events):
            async for data in events:
                yield data
    except APIError as error:
        yield event(error.body())
    except Exception as error:
        yield event(unexpected(error).body())
    yield DONE
