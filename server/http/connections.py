"""Connections, with the limits and time-outs that uvicorn's protocol lacks."""

from __future__ import annotations

import asyncio
import resource
import select
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine.utils.fair_tasks import FairTasks
from server.http.entrance import BEGIN_AT_ONCE, Entrance

_ENOUGH_FILES = 1 << 18
_OTHER_FILES = 256
_ENOUGH_CONNECTIONS = 16_384
# Most bytes that are parsed before it is asked whether a request is complete: of headers, and of a body.
_HEADER_PART, _BODY_PART = 2 << 10, 16 << 10
_CHUNKED = b"transfer-encoding: chunked\r\n"  # as uvicorn writes it
_CHUNK_OVERHEAD = 8  # bytes of framing for each byte of a body sent in one-byte chunks


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a server's connections."""

    max_connections: int
    max_header_bytes: int
    header_timeout: float  # seconds from the start of a connection or request to the end of the headers
    send_timeout: float  # seconds that a client may leave a full buffer unread


class Connections:
    """The connections of a server. If there are too many, the connection that was idle longest is closed.

    Requests of different tenants start alternately, so that a burst of one tenant does not delay others.
    """

    is_counted = True  # `num_working` is known

    def __init__(self, limits: ConnectionLimits, entrance: Entrance) -> None:
        self.limits, self.entrance = limits, entrance
        self.fair = FairTasks(BEGIN_AT_ONCE)
        self._all: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # connections without a request, the one idle longest first

    def protocol(self, **uvicorn: Any) -> Connection:
        """Create a connection. uvicorn calls this as its protocol class."""
        return Connection(self, **uvicorn)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_working(self) -> int:
        """Number of POST requests that have arrived completely and are unanswered."""
        return sum(connection.is_working for connection in self._all)

    def opened(self, connection: Connection) -> bool:
        """Register a connection, closing the one idle longest if there are too many. Returns False if none is idle."""
        if len(self._all) >= self.limits.max_connections:
            if not self._idle:
                return False
            longest = next(iter(self._idle))
            self.closed(longest)
            longest.transport.abort()
        self._all.add(connection)
        self._idle[connection] = None
        return True

    def closed(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._idle.pop(connection, None)

    def working(self, connection: Connection) -> None:
        """Record that the connection has a request."""
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """Record that the connection's request is answered."""
        self._idle[connection] = None

    def abort(self) -> None:
        """Close all connections at once, without sending or receiving the rest."""
        for connection in list(self._all):
            connection.transport.abort()


class _Timer:
    """Calls a function some time after `start`, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, function: Callable[[], None]) -> None:
        self._loop, self._seconds, self._function = loop, seconds, function
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer, unless it is running."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._run)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        """Stop the timer for good. Drops the function, so that no reference cycle keeps the connection alive."""
        self.stop()
        self._function = _nothing

    def _run(self) -> None:
        self._handle = None
        self._function()


def _nothing() -> None:
    pass


class Connection(HttpToolsProtocol):
    """A connection with limits and time-outs."""

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._others, self._limits = connections, connections.limits
        self._in_headers = True
        self._unparsed = b""  # what came behind a complete request that is not answered
        self._num_bytes = self._num_body_bytes = 0  # of the request being received
        self._receiving = _Timer(self.loop, self._limits.header_timeout, self._rest_is_late)
        self._sending = _Timer(self.loop, self._limits.send_timeout, lambda: self.transport.abort())

    @property
    def _is_busy(self) -> bool:
        """Return whether a request is unanswered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_working(self) -> bool:
        """Return whether an unanswered POST request has arrived completely."""
        return self._is_busy and not self.cycle.more_body and self.cycle.scope["method"] == "POST"

    # ---- called by uvicorn and the transport ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._others.opened(self):
            self._receiving.start()
        else:
            self._refuse(503, "Service Unavailable", "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.closed(self)
        self._receiving.close()
        self._sending.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parse what has arrived, in parts, up to the end of a request that is not answered yet.

        The requests behind it are neither parsed nor read until its response is complete, so that a connection with
        thousands of them takes no more of the event loop than others.
        """
        data, self._unparsed = self._unparsed, b""
        start = 0
        while start < len(data) and not self.transport.is_closing():
            if self._is_busy and not self.cycle.more_body:
                self._unparsed = data[start:]
                self.flow.pause_reading()
                return
            end = start + (_HEADER_PART if self._in_headers else _BODY_PART)
            self._parse_part(data[start:end])
            start = end

    def _parse_part(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        # Chunk sizes, chunk extensions and trailers count as headers.
        self._check_header_bytes(self._num_bytes - (1 + _CHUNK_OVERHEAD) * self._num_body_bytes)
        if self._in_headers and not self._is_busy:
            self._receiving.start()

    def on_headers_complete(self) -> None:
        self._check_header_bytes(len(self.url) + sum(len(name) + len(value) for name, value in self.headers))
        if self.transport.is_closing():
            raise ConnectionAbortedError  # stops the parser
        self._in_headers = False
        self._receiving.stop()
        self._others.working(self)
        super().on_headers_complete()
        kind = _Unframed if self.scope["http_version"] == "1.0" else _HeadAndBody
        self.cycle.transport = cast(asyncio.Transport, kind(self.transport, self.loop))

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._num_bytes = self._num_body_bytes = 0
        self._receiving.stop()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # otherwise it was refused for another reason
            super().send_400_response(msg)
            self._sending.start()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start requests of different tenants alternately. Drop a request whose client has disconnected meanwhile."""
        tenant = self._others.entrance.tenant(cycle.scope)  # type: ignore[arg-type]  # uvicorn has types of its own
        if tenant is None:
            self.start(cycle, app)
        else:
            self._others.fair.add(tenant, _Arrived(self, cycle, app))

    def start(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the request."""
        super()._start_asgi_task(cycle, app)

    def has_hung_up(self) -> bool:
        """Return whether the client has disconnected, even if the event loop has not seen it yet."""
        connection = self.transport.get_extra_info("socket")
        if connection is None or self.transport.is_closing():
            return connection is not None
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def _check_header_bytes(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_header_bytes:
            most = self._limits.max_header_bytes
            self._refuse(431, "Request Header Fields Too Large", f"the headers may have at most {most} bytes")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._sending.start()
        elif not self._is_busy:
            self._others.idle(self)
            if self.cycle.more_body:  # the rest of the body is not read
                self._receiving.start()
            if self._unparsed:
                self.loop.call_soon(self._parse)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._sending.start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._sending.stop()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore the upgrade without logging, so that clients cannot fill the log."""

    def _rest_is_late(self) -> None:
        if not self._is_busy:  # otherwise the late one is a second request, and the first is being answered
            self.transport.abort()

    def _refuse(self, status: int, phrase: str, reason: str) -> None:
        body = (
            f'{{"error":{{"message":"{reason}","type":"{phrase.replace(" ", "")}Error","param":null,"code":{status}}}}}'
        )
        head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(f"{head}Connection: close\r\n\r\n{body}".encode())
        self.transport.close()
        self._sending.start()


class _HeadAndBody:
    """Sends the head of a response together with the start of its body, since each `write` is a system call that wakes
    the client. Replaces the transport for one response.
    """

    __slots__ = ("_head", "_is_sent", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head, self._is_sent = b"", False

    def write(self, data: bytes) -> None:
        if self._is_sent:
            self._transport.write(data)
        elif self._head:
            self._send(data)
        else:
            self._head = data
            self._loop.call_soon(self._send)  # if no body follows at once

    def _send(self, more: bytes = b"") -> None:
        if not self._is_sent:
            self._is_sent = True
            self._transport.write(self._head + more)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class _Unframed(_HeadAndBody):
    """Sends a response to a client of HTTP/1.0, which knows no chunks (RFC 9112, 6.1): the body ends with the
    connection.
    """

    __slots__ = ("_has_head", "_is_chunked")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport, loop)
        self._has_head = self._is_chunked = False

    def write(self, data: bytes) -> None:
        if not self._has_head:
            self._has_head, self._is_chunked = True, _CHUNKED in data
            data = data.replace(_CHUNKED, b"", 1)
        elif self._is_chunked:
            data = _without_frames(data)
        super().write(data)


def _without_frames(data: bytes) -> bytes:
    """Return the content of whole chunks."""
    parts = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        num_bytes = int(size, 16)
        parts.append(rest[:num_bytes])
        data = rest[num_bytes + 2 :]
    return b"".join(parts)


class _Arrived:
    """A request that has not started."""

    __slots__ = ("_app", "_connection", "_cycle")

    def __init__(self, connection: Connection, cycle: RequestResponseCycle, app: Any) -> None:
        self._connection, self._cycle, self._app = connection, cycle, app

    def done(self) -> bool:
        return self._cycle.disconnected or self._connection.has_hung_up()

    def set_result(self, result: None) -> None:
        self._connection.start(self._cycle, self._app)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._connection.loop


def raise_open_files() -> int:
    """Raise this process's limit of open files and sockets as far as allowed. Returns the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def default_max_connections(max_open_files: int) -> int:
    """Return the default limit of connections: leaves some files for other uses, and bounds the memory of idle
    connections.
    """
    return min(max(max_open_files - _OTHER_FILES, max_open_files // 2), _ENOUGH_CONNECTIONS)
