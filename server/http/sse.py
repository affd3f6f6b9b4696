"""Server-sent events: JSON objects in, the bytes of a response out.

An event is `data: {json}` and an empty line, after a line with its name if it has one. A stream ends the same way after
an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from server.http.disconnect import disconnected, ended_by
from server.http.errors import APIError, unexpected

DIRECT_SEND = "quire.send"  # key of a scope: how to send what middleware has nothing to say about
EVENTS = "text/event-stream; charset=utf-8"
_KEEP_ALIVE = ServerSentEvent(comment="keep-alive", sep="\n").encode()


def event(json: bytes, name: bytes = b"") -> bytes:
    return (b"event: " + name + b"\n" if name else b"") + b"data: " + json + b"\n\n"


class EventStream(EventSourceResponse):
    """The response that sends `events` (each made by `event`), then `end`. What fails becomes one more event.

    When the client hangs up the task that waits for the next event is cancelled. One task watches for that and for silence;
    the library has a group of four for each stream, which costs as much as all the rest of a request.
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
        """`keep_alive`: seconds between comments, which keep proxies from closing a silent stream; 0: none. `media_type`:
        of another kind of stream.
        """
        super().__init__(events, media_type=media_type)
        self._events, self._failure, self._end, self._keep_alive = events, failure, end, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_event: Send = scope.get(DIRECT_SEND, send)
        async with ended_by(self._watch(receive, send_event)):
            await self._stream(send, send_event)

    async def _stream(self, send: Send, send_event: Send) -> None:
        last = self._end
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send_event({"type": "http.response.body", "body": data, "more_body": True})
        except APIError as error:
            last = self._failure(error) + last
        except Exception as error:
            last = self._failure(unexpected(error)) + last
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _watch(self, receive: Receive, send_event: Send) -> None:
        """Until the client hangs up."""
        while True:
            try:
                async with asyncio.timeout(self._keep_alive or None):
                    await disconnected(receive)
                return
            except TimeoutError:
                await send_event({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
