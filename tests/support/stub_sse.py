"""A stub of an OpenAI-compatible server on a real socket, in a thread. The first part of the path says how it
behaves.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

EVENT_STREAM = "Content-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"


@dataclass
class Stub:
    """`url(behaviour)` is a base URL; `requests` are the bodies that came, `num_connections` how many sockets."""

    port: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    num_connections: int = 0

    def url(self, behaviour: str) -> str:
        return f"http://127.0.0.1:{self.port}/{behaviour}"

    async def serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._serve_request(reader, writer):
                pass
        writer.close()

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        behaviour, _, path = path.lstrip("/").partition("/")
        length = [line for line in head.lower().splitlines() if line.startswith("content-length:")]
        body = json.loads(await reader.readexactly(int(length[0].split(":")[1]))) if length else {}
        if method == "GET":
            models = {"data": [{"id": "stub-model", "max_model_len": 4096}]}
            known = {"v1/models": models, "version": {"version": "0.0.1"}}
            if behaviour == "unlisted" or path not in known:
                return await respond(writer, 404, json.dumps({"detail": "Not Found"}))
            return await respond(writer, 200, json.dumps(known[path]))
        if path == "detokenize":
            return await respond(writer, 200, json.dumps({"prompt": " ".join(map(str, body["tokens"]))}))
        self.requests.append(body)
        self.headers.append(head)
        return bool(await getattr(self, "as_" + behaviour.replace("-", "_"))(body, writer))

    # How it behaves

    async def as_ok(self, body: Any, writer: Any) -> bool:
        await start_stream(writer)
        for event in events(body):
            await send(writer, event)
        return await end_stream(writer)

    as_unlisted = as_ok

    async def as_crlf(self, body: Any, writer: Any) -> bool:
        await start_stream(writer)
        for event in events(body):
            await send(writer, event.replace(b"\n\n", b"\r\n\r\n"))
        return await end_stream(writer)

    async def as_lump(self, body: Any, writer: Any) -> bool:
        await start_stream(writer)
        await send(writer, b": keep-alive\n\n" + b"".join(events(body)))
        return await end_stream(writer)

    async def as_dribble(self, body: Any, writer: Any) -> bool:
        await start_stream(writer)
        data = b"".join(events(body))
        for i in range(0, len(data), 7):
            await send(writer, data[i : i + 7])
        return await end_stream(writer)

    async def as_usage_always(self, body: Any, writer: Any) -> bool:
        await start_stream(writer)
        for number, event in enumerate(events(body), 1):
            usage = b', "usage": {"prompt_tokens": 3, "completion_tokens": %d}}\n\n' % number
            await send(writer, event.replace(b"}\n\n", usage) if b'"text"' in event else event)
        return await end_stream(writer)

    async def as_until_closed(self, body: Any, writer: Any) -> bool:
        """HTTP/1.0: the end of the body is the end of the connection."""
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + b"".join(events(body)))
        await writer.drain()
        return False

    async def as_one_shot(self, body: Any, writer: Any) -> bool:
        """Closes the connection after each answer and does not say so."""
        await self.as_ok(body, writer)
        return False

    async def as_small_vocabulary(self, body: Any, writer: Any) -> bool:
        if max(body["prompt"]) >= 300:
            return await respond(writer, 400, json.dumps({"error": {"message": "prompt: token ids must be below 300"}}))
        return await self.as_ok(body, writer)

    async def as_unauthorized(self, body: Any, writer: Any) -> bool:
        return await respond(writer, 401, json.dumps({"error": {"message": "wrong key"}}))

    async def as_overloaded(self, body: Any, writer: Any) -> bool:
        return await respond(writer, 503, "<html>try later</html>")

    async def as_not_streaming(self, body: Any, writer: Any) -> bool:
        return await respond(writer, 200, json.dumps({"choices": [{"text": "all at once"}]}))

    async def as_error_midway(self, body: Any, writer: Any) -> bool:
        await start_stream(writer)
        for event in events(body)[:2]:
            await send(writer, event)
        await send(writer, b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')
        await send(writer, b"data: [DONE]\n\n")
        return await end_stream(writer)

    async def as_closed_midway(self, body: Any, writer: Any) -> bool:
        await start_stream(writer)
        await send(writer, events(body)[0])
        return False

    async def as_no_done(self, body: Any, writer: Any) -> bool:
        await start_stream(writer)
        await send(writer, b"".join(events(body)[:-1]))
        return await end_stream(writer)

    async def as_no_tokens(self, body: Any, writer: Any) -> bool:
        await start_stream(writer)
        await send(writer, b"data: [DONE]\n\n")
        return await end_stream(writer)

    async def as_nonsense(self, body: Any, writer: Any) -> bool:
        await start_stream(writer)
        await send(writer, b"data: {]\n\n")
        return await end_stream(writer)

    async def as_not_http(self, body: Any, writer: Any) -> bool:
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        await writer.drain()
        return False

    async def as_hanging(self, body: Any, writer: Any) -> bool:
        await start_stream(writer)
        await send(writer, events(body)[0])
        await asyncio.sleep(30)
        return False

    async def as_mostly_ok(self, body: Any, writer: Any) -> bool:
        """Every third request fails, the third one of them in another way."""
        number = len(self.requests)
        if number % 9 == 0:
            return await self.as_overloaded(body, writer)
        return await (self.as_error_midway if number % 3 == 0 else self.as_ok)(body, writer)

    async def as_ok_once(self, body: Any, writer: Any) -> bool:
        """Only the first request is answered; every third one of the others fails in another way."""
        if len(self.requests) == 1:
            return await self.as_ok(body, writer)
        return await (self.as_error_midway if len(self.requests) % 3 == 0 else self.as_overloaded)(body, writer)


def events(body: dict[str, Any]) -> list[bytes]:
    """The events of an answer of the wanted length; the last but one is the usage."""
    chat = "messages" in body
    count = body["max_completion_tokens" if chat else "max_tokens"]
    common = {"id": "x", "object": "chunk", "created": 1700000000, "model": body["model"]}

    def event(content: Any) -> bytes:
        return b"data: " + json.dumps(content).encode() + b"\n\n"

    found = []
    if chat:
        found.append(event({**common, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
    for i in range(count):
        choice = {"index": 0, "delta": {"content": f" {i}"}} if chat else {"index": 0, "text": f" {i}"}
        if body.get("return_token_ids"):
            choice["token_ids"] = [i]
        found.append(event({**common, "choices": [choice | {"finish_reason": "length" if i == count - 1 else None}]}))
    usage = {"prompt_tokens": 7, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 5}}
    return [*found, event({**common, "choices": [], "usage": usage}), b"data: [DONE]\n\n"]


async def respond(writer: asyncio.StreamWriter, status: int, body: str) -> bool:
    data = body.encode()
    writer.write(
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    )
    writer.write(data)
    await writer.drain()
    return True


async def start_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(f"HTTP/1.1 200 OK\r\n{EVENT_STREAM}\r\n".encode())
    await writer.drain()


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()
    await asyncio.sleep(0)


async def end_stream(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


@contextlib.contextmanager
def run_stub() -> Iterator[Stub]:
    stub, started = Stub(), threading.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        server = await asyncio.start_server(stub.serve_connection, "127.0.0.1", 0)
        stub.port = server.sockets[0].getsockname()[1]
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await stopped.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    stopped = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert started.wait(60)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(60)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
