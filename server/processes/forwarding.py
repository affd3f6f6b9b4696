"""HTTP requests that an API process passes on to the main process, and their answers, as ASGI messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.utils.log import traceback_without_text
from server.processes.messages import Answer, Body, BodyWanted, Failed, Forward, Sent

_log = logging.getLogger(__name__)
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string")
_PAIRS = ("client", "server")  # of an address and a port
_DISCONNECT = {"type": "http.disconnect"}
SendMessage = Callable[[Any], None]


class Forwarder:
    """The ASGI app of an API process for what the main process answers."""

    def __init__(self, send: SendMessage) -> None:
        self._send = send
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Queue[Answer | BodyWanted | Failed]] = {}

    def take(self, message: Answer | BodyWanted | Failed) -> None:
        """Process a message of the main process."""
        if (queue := self._waiting.get(message.id)) is not None:
            queue.put_nowait(message)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = next(self._ids)
        queue = self._waiting[number] = asyncio.Queue()
        head = {name: scope[name] for name in (*_SCOPE, *_PAIRS) if scope.get(name) is not None}
        self._send(Forward(number, head, list(scope["headers"])))
        receiving: asyncio.Task[None] | None = None
        try:
            while True:
                match await queue.get():
                    case BodyWanted():
                        receiving = asyncio.create_task(self._receive(number, receive))
                    case Answer(status=status, headers=headers) if status:
                        await send({"type": "http.response.start", "status": status, "headers": headers})
                        self._send(Sent(number))
                    case Answer(body=body, more=more):
                        await send({"type": "http.response.body", "body": body, "more_body": more})
                        self._send(Sent(number))
                        if not more:
                            return
                    case Failed():
                        raise RuntimeError("the main process did not answer")
        finally:
            del self._waiting[number]
            if receiving is not None:
                receiving.cancel()

    async def _receive(self, number: int, receive: Receive) -> None:
        message = await receive()
        if message["type"] == "http.disconnect":
            self._send(Body(number, is_disconnected=True))
        else:
            self._send(Body(number, message.get("body", b""), message.get("more_body", False)))


class _Forwarded:
    """A request in the main process."""

    def __init__(self, number: int, send: SendMessage) -> None:
        self._number, self._send = number, send
        self._received: asyncio.Future[Body] | None = None
        self._sent: asyncio.Future[None] | None = None
        self._is_gone = False
        self.is_complete = False  # the end of the answer has been sent

    async def receive(self) -> Message:
        if self._is_gone:
            return _DISCONNECT
        if self._received is None:  # otherwise it was asked for before, and the task that waited was cancelled
            self._received = asyncio.get_running_loop().create_future()
            self._send(BodyWanted(self._number))
        body = await asyncio.shield(self._received)
        self._received = None
        self._is_gone = self._is_gone or body.is_disconnected
        if body.is_disconnected:
            return _DISCONNECT
        return {"type": "http.request", "body": body.body, "more_body": body.more}

    async def send(self, message: Message) -> None:
        """Send a part of the answer. Returns once the client's connection has taken it."""
        if self._is_gone:
            return
        if message["type"] == "http.response.start":
            part = Answer(self._number, message["status"], list(message["headers"]))
        else:
            part = Answer(self._number, body=bytes(message.get("body", b"")), more=message.get("more_body", False))
        self._sent = asyncio.get_running_loop().create_future()
        self.is_complete = not part.more
        self._send(part)
        await self._sent

    def take(self, message: Body | Sent) -> None:
        future: asyncio.Future[Any] | None = self._received if isinstance(message, Body) else self._sent
        if future is not None and not future.done():
            future.set_result(message if isinstance(message, Body) else None)

    def disconnect(self) -> None:
        """The API process is lost."""
        self.take(Body(self._number, is_disconnected=True))
        self.take(Sent(self._number))
        self._is_gone = True


class Forwards:
    """The requests that one API process has passed on."""

    def __init__(self, app: ASGIApp, send: SendMessage) -> None:
        self._app, self._send = app, send
        self._running: dict[int, _Forwarded] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, message: Forward) -> None:
        """Answer a request."""
        scope: dict[str, Any] = {**message.scope, "asgi": {"version": "3.0", "spec_version": "2.3"}, "state": {}}
        scope["headers"] = message.headers
        scope |= {name: tuple(scope[name]) for name in _PAIRS if name in scope}
        forwarded = self._running[message.id] = _Forwarded(message.id, self._send)
        task = asyncio.create_task(self._run(scope, forwarded, message.id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, scope: Scope, forwarded: _Forwarded, number: int) -> None:
        try:
            await self._app(scope, forwarded.receive, forwarded.send)
            if not forwarded.is_complete:  # the client is gone, for whom the API process still waits
                self._send(Answer(number, more=False))
        except Exception as error:
            _log.error("a request failed: %s", traceback_without_text(error))
            self._send(Failed(number))
        finally:
            del self._running[number]

    def take(self, message: Body | Sent) -> None:
        """Process a message about a request."""
        if (forwarded := self._running.get(message.id)) is not None:
            forwarded.take(message)

    def disconnect(self) -> None:
        """The API process is lost: its clients are, too."""
        for forwarded in self._running.values():
            forwarded.disconnect()
