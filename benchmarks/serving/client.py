"""A cheap client for OpenAI-compatible servers: many streamed answers on one core, with a time for every event.

An event costs one comparison of bytes: only the first ones of an answer, and those that look different from them, are
parsed.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
import time
from array import array
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from engine.errors import ConfigError

_now = time.perf_counter
UNREACHABLE = ("connection refused", "host not found", "cannot connect", "TLS", "timeout")  # causes: there is no server
_HAS_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\{')


class Failure(Exception):
    """A request that got no whole answer. `cause` is the kind, equal for all that fail alike; str() has the details."""

    def __init__(self, cause: str, details: str = "") -> None:
        super().__init__(f"{cause}: {details}" if details else cause)
        self.cause = cause


@dataclass(slots=True)
class Answer:
    """When an answer came. Times are of `time.perf_counter`."""

    prompt_len: int  # as the server counted, else as the caller said
    start: float = 0.0  # when it was sent, or the connection for it was begun
    queue_time: float = 0.0  # how long it waited before that for other requests to end
    times: array[float] = field(default_factory=lambda: array("d"))  # of each event with new tokens
    output_len: int = 0  # as the server counted, else the number of events
    num_cached: int = 0  # prompt tokens from the server's prefix cache
    events: list[bytes] | None = None  # the raw events with tokens, when they are kept
    error: str = ""
    cause: str = ""

    @property
    def ok(self) -> bool:
        return not self.cause

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start if self.times else 0.0

    @property
    def latency(self) -> float:
        return self.times[-1] - self.start if self.times else 0.0

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def text(self) -> str:
        return "".join(_text_of(_decode(event[5:])) for event in self.events or [])


def _text_of(content: Any) -> str:
    choice = content["choices"][0]
    if "delta" in choice:
        delta = choice["delta"]
        return (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
    return choice.get("text") or ""


def _decode(data: bytes) -> Any:
    return msgspec.json.decode(data)


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. `httptools` calls the `on_` methods."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.num_requests = self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def send(self, request: bytes, answer: Answer, streamed: bool) -> asyncio.Future[None]:
        """Done when the response is whole; its body is in `body` unless it is an event stream."""
        assert self.transport is not None
        self.answer, self.streamed = answer, streamed
        self.body, self.headers, self.status = b"", {}, 0
        self.received = self.finished = False
        self._tail, self._marker = b"", b"\0"
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.num_requests += 1
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._time = _now()
        self.received = True
        try:
            self._parser.feed_data(data)
        except Failure as error:
            self._end(error)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._end(cause if isinstance(cause, Failure) else Failure("not understood", repr(cause)))
        except httptools.HttpParserError as error:
            self._end(Failure("not an HTTP response", str(error)))

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value.lower()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.streamed:
            self.streamed = self.status == 200 and b"text/event-stream" in self.headers.get(b"content-type", b"")

    def on_body(self, data: bytes) -> None:
        if not self.streamed:
            self.body += data
            return
        if self._tail or not data.endswith(b"\n\n"):
            data = (self._tail + data).replace(b"\r\n", b"\n")
            end = data.rfind(b"\n\n") + 2
            self._tail = data[end:] if end > 1 else data
            data = data[:end] if end > 1 else b""
        for event in data.split(b"\n\n") if data.find(b"\n\n") < len(data) - 2 else (data,):
            if event.startswith(self._marker):
                self.answer.times.append(self._time)
                if self.answer.events is not None:
                    self.answer.events.append(event)
            elif event:
                self._unusual_event(event)

    def _unusual_event(self, event: bytes) -> None:
        """The first events, the last ones, comments and errors."""
        answer = self.answer
        for line in event.split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            if line[5:].strip() == b"[DONE]":
                self.finished = True
                continue
            try:
                content = _decode(line[5:])
                if content.get("error") is not None:
                    error = content["error"]
                    raise Failure("error in the stream", str(error["message"] if isinstance(error, dict) else error))
                if usage := content.get("usage"):
                    answer.output_len = usage["completion_tokens"] or answer.output_len
                    answer.prompt_len = usage["prompt_tokens"] or answer.prompt_len
                    details = usage.get("prompt_tokens_details") or {}
                    answer.num_cached = details.get("cached_tokens") or 0
                choices = content.get("choices")
                if not choices or _only_role(choices[0]):
                    continue
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise Failure("not understood", f"{error} in the event {line[:200]!r}") from None
            answer.times.append(self._time)
            if answer.events is not None:
                answer.events.append(line)
            if (found := _HAS_CHOICES.search(line)) is not None:
                self._marker = line[: found.end()]

    def on_message_complete(self) -> None:
        keep = self._parser.should_keep_alive()
        self._end(None)
        if not keep and self.transport is not None:
            self.transport.close()

    def eof_received(self) -> None:
        if self.status and not self.headers.keys() & {b"content-length", b"transfer-encoding"}:
            self._end(None)  # the end of a body that says no length

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._end(Failure("connection lost", str(error or "closed by the server")))

    def _end(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)
        if error is not None and self.transport is not None:
            self.transport.close()


def _only_role(choice: dict[str, Any]) -> bool:
    """Is this the opening of a chat answer, sent before there is a token?"""
    delta = choice.get("delta")
    return (
        delta is not None
        and "role" in delta
        and choice.get("finish_reason") is None
        and not any(value for name, value in delta.items() if name != "role")
    )


class Client:
    """Connections to one server. Its methods raise `Failure` and nothing else."""

    def __init__(
        self,
        base_url: str,
        *,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
        insecure: bool = False,
        keep_events: bool = False,
    ) -> None:
        """`ConfigError` when `base_url` is none. `timeout`: seconds for a whole answer. `insecure`: any certificate."""
        url = urlsplit(base_url)
        try:
            port = url.port
        except ValueError:
            port = -1
        if url.scheme not in ("http", "https") or not url.hostname or port == -1:
            raise ConfigError(f"base_url must be like http://127.0.0.1:8000, got {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._host, self._path = url.hostname, url.path.rstrip("/")
        self._port = port or (443 if url.scheme == "https" else 80)
        self._timeout, self._keep_events = timeout, keep_events
        self._ssl: ssl.SSLContext | None = None
        if url.scheme == "https":
            self._ssl = ssl.create_default_context()
            if insecure:
                self._ssl.check_hostname, self._ssl.verify_mode = False, ssl.CERT_NONE
        host = url.netloc.rpartition("@")[2]
        lines = [f"Host: {host}", "User-Agent: quire-bench", "Accept: */*"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._head = "\r\n".join(lines)
        self._idle: list[_Connection] = []

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """The bytes of a request, to be made before the clock runs."""
        data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        return head.encode() + b"\r\n" + data

    async def stream(self, request: bytes, prompt_len: int = 0) -> Answer:
        """Send a request whose answer is an event stream, and note when its events come. Failures are in the answer."""
        answer = Answer(prompt_len, start=_now(), events=[] if self._keep_events else None)
        try:
            connection = await self._exchange(request, answer, streamed=True)
            if not connection.streamed:
                raise _refusal(connection)
            if not connection.finished:
                raise Failure("stream ended early", f"after {len(answer.times)} events, without [DONE]")
            if not answer.times:
                raise Failure("no tokens", "the stream had none")
            answer.output_len = answer.output_len or len(answer.times)
        except Failure as error:
            answer.cause, answer.error = error.cause, str(error)
        return answer

    async def fetch(self, method: str, path: str, body: Any = None) -> bytes:
        """The body of an ordinary response; `Failure` unless its status is 200."""
        connection = await self._exchange(self.request(method, path, body), Answer(0), streamed=False)
        if connection.status != 200:
            raise _refusal(connection)
        return connection.body

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an ordinary response; `Failure` when there is none."""
        data = await self.fetch(method, path, body)
        try:
            return _decode(data)
        except ValueError:
            raise Failure("not JSON", repr(data[:200])) from None

    async def metrics(self) -> str:
        """The text of /metrics; empty where there is none."""
        try:
            return (await self.fetch("GET", "/metrics")).decode(errors="replace")
        except Failure:
            return ""

    async def close(self) -> None:
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()
        self._idle.clear()
        await asyncio.sleep(0)

    async def _exchange(self, request: bytes, answer: Answer, streamed: bool) -> _Connection:
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    connection = self._take_idle() or await self._connect()
                    try:
                        await connection.send(request, answer, streamed)
                        break
                    except Failure:
                        if connection.num_requests == 1 or connection.received:
                            raise  # else: the server had closed the idle connection
        except TimeoutError:
            raise Failure("timeout", f"no whole answer after {self._timeout:g} s") from None
        finally:
            if connection is not None and connection.usable:
                done = connection._done
                if done is not None and done.done() and not done.cancelled() and done.exception() is None:
                    self._idle.append(connection)
                elif connection.transport is not None:
                    connection.transport.abort()
        return connection

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self._host, self._port, ssl=self._ssl
            )
        except ConnectionRefusedError:
            raise Failure("connection refused", f"{self._host}:{self._port}") from None
        except ssl.SSLError as error:
            raise Failure("TLS", error.reason or str(error)) from None
        except socket.gaierror:
            raise Failure("host not found", str(self._host)) from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise Failure("too many open files", "raise `ulimit -n`") from None
            if "refused" in str(error):  # several addresses were tried
                raise Failure("connection refused", f"{self._host}:{self._port}") from None
            raise Failure("cannot connect", error.strerror or str(error)) from None
        return connection


def _refusal(connection: _Connection) -> Failure:
    """Fault of a response that is no event stream."""
    try:
        content = _decode(connection.body)
        error = content.get("error", content)
        message = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError, AttributeError):
        message = connection.body[:200].decode(errors="replace")
    if connection.status == 200:
        return Failure("not an event stream", message[:300])
    return Failure(f"HTTP {connection.status}", str(message)[:300])
