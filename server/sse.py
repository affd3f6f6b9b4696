"""Server-sent events: JSON objects in, the bytes of a response out. Knows no model and no endpoint.

An event is `data: {json}` and an empty line, after a line with its name if it has one. A stream ends the same way after
an error, for OpenAI's older endpoints with `data: [DONE]`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from server.errors import APIError, unexpected

DIRECT_SEND = "quire.send"  # key of a scope: how to send what middleware has nothing to say about
DONE = b"data: [DONE]\n\n"
_SHUTDOWN_MARGIN = 5.0  # seconds that a stream may take to say goodbye once its request has been ended
_CLEANUP_SECONDS = 5.0  # for a stream to be closed once nobody reads it


def event(json: bytes, name: bytes = b"") -> bytes:
    return (b"event: " + name + b"\n" if name else b"") + b"data: " + json + b"\n\n"


def failure(error: APIError) -> bytes:
    """The event of an error, as OpenAI's older endpoints have it."""
    return event(error.body())


def stream(
    events: AsyncGenerator[bytes, None],
    *,
    failure: Callable[[APIError], bytes],
    end: bytes,
    keep_alive: float,
    shutdown_timeout: float,
) -> EventSourceResponse:
    """The response that sends `events` (each made by `event`), then `end`. What fails becomes one more event.

    When the client hangs up the task that waits for the next event is cancelled. `keep_alive`: seconds between comments
    while nothing else is sent; 0: none. `shutdown_timeout`: how long it may go on while the server stops.
    """
    return _EventStream(
        events,
        failure,
        end,
        media_type="text/event-stream; charset=utf-8",
        ping=keep_alive,
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
        sep="\n",
        shutdown_grace_period=shutdown_timeout + _SHUTDOWN_MARGIN,
    )


class _EventStream(EventSourceResponse):
    """The library's response, with its watch over client, silence and shutdown, but not its work on each event.

    The base class makes bytes of what is bytes, logs them, and sends each under a time limit that nobody set.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], failure: Callable[[APIError], bytes], end: bytes, **options: Any
    ) -> None:
        super().__init__(events, **options)
        self._events, self._failure, self._end = events, failure, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_event: Send = scope.get(DIRECT_SEND, send)
        await super().__call__(scope, receive, send)

    async def _stream_response(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        send_event, last = self._send_event, self._end
        try:
            async for data in self._events:
                await send_event({"type": "http.response.body", "body": data, "more_body": True})
        except APIError as error:
            last = self._failure(error) + last
        except Exception as error:
            last = self._failure(unexpected(error)) + last
        finally:
            with anyio.move_on_after(_CLEANUP_SECONDS, shield=True):
                await self._events.aclose()
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": last, "more_body": False})
