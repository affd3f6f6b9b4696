"""Server-sent events.

An event is an optional line with its name, a line `data: {json}` and an empty line. After an error, a stream ends in
the same way as otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from time import monotonic

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from server.generation.errors import RequestError
from server.http.disconnect import disconnected, ended_by
from server.http.errors import APIError, unexpected, with_status
from server.observability.context import PREFIX_HEADER, prefix_note

DIRECT_SEND = "quire.send"  # key in the ASGI scope: a `send` that bypasses the middleware
EVENTS = "text/event-stream; charset=utf-8"
_KEEP_ALIVE = ServerSentEvent(comment="keep-alive", sep="\n").encode()


def event(json: bytes, name: bytes = b"") -> bytes:
    return (b"event: " + name + b"\n" if name else b"") + b"data: " + json + b"\n\n"


class EventStream(EventSourceResponse):
    """A response that sends `events` (each made by `event`), then `end`. An error becomes one more event.

    When the client disconnects, the task that waits for the next event is cancelled. One task detects that and sends
    keep-alive comments. sse-starlette uses four tasks per stream, which cost as much as the rest of a request.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        failure: Callable[[APIError], bytes],
        end: bytes,
        keep_alive: float,
        media_type: str = EVENTS,
    ) -> None:
        """`failure`: makes the event of an error. `keep_alive`: seconds of silence before a comment, which keeps
        proxies from closing the stream; 0: no comments. `media_type`: for other kinds of streams.
        """
        super().__init__(events, media_type=media_type)
        del self.headers["connection"]  # the HTTP server's own
        self._events, self._failure, self._end, self._keep_alive = events, failure, end, keep_alive
        self._last_sent = 0.0  # monotonic seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_event: Send = scope.get(DIRECT_SEND, send)
        async with ended_by(self._watch(receive, send_event)):
            await self._stream(send, send_event)

    async def _stream(self, send: Send, send_event: Send) -> None:
        last, self._last_sent = self._end, monotonic()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send_event({"type": "http.response.body", "body": data, "more_body": True})
                self._last_sent = monotonic()
        except RequestError as error:
            last = self._failure(with_status(error)) + last
        except Exception as error:
            last = self._failure(unexpected(error)) + last
        finally:
            await self._events.aclose()
        if self.media_type == EVENTS and (note := prefix_note()):
            last = f": {PREFIX_HEADER} {note}\n\n".encode() + last
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _watch(self, receive: Receive, send_event: Send) -> None:
        """Send a comment whenever the stream has been silent for the interval, until the client disconnects."""
        silent = 0.0
        while True:
            try:
                async with asyncio.timeout(self._keep_alive - silent if self._keep_alive else None):
                    await disconnected(receive)
                return
            except TimeoutError:
                silent = monotonic() - self._last_sent
            if silent >= self._keep_alive:
                await send_event({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
                self._last_sent, silent = monotonic(), 0.0
