"""The attacks: each sends what an unfriendly client would, and returns the statuses that came back.

0 stands for a connection that the server closed without an answer, -1 for no answer in time.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tests.attack import images
from tests.attack.target import Answer, Target
from tests.clients.fuzz_api import Broken
from tests.server.generation.test_hostile_grammars import HOSTILE

Statuses = Counter[int]
CHAT, COMPLETIONS, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"
HANGS = -1


@dataclass(frozen=True)
class Attack:
    """`refused`: every request of it must be refused, none served. `keyless`: it is for a server without keys.
    `images`: for a server of a model that reads images.
    """

    name: str
    run: Callable[[Target], Awaitable[Statuses]]
    refused: bool = False
    keyless: bool = False
    images: bool = False


def _statuses(answers: Iterable[Answer]) -> Statuses:
    return Counter(answer.status for answer in answers)


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


# ---- small requests that ask for much work, and large ones ----

LONG = "once upon a time " * 230_000
USER = [{"role": "user", "content": "a"}]


def _tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **more}}


def _call(arguments: str) -> list[Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _completion(**fields: Any) -> tuple[str, bytes]:
    return COMPLETIONS, _text({"prompt": "a", "max_tokens": 1, **fields})


def _chat(**fields: Any) -> tuple[str, bytes]:
    return CHAT, _text({"messages": USER, "max_tokens": 1, **fields})


BODIES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "40,000 tools to count": lambda: (TOKENIZE,
    _text({"messages": USER, "tools": [_tool(f"f{i}") for i in range(40_000)]})),
    "2,000 prompts x n = 128": lambda: _completion(prompt=["a"] * 2000, n=128),
    "a million stop token ids, n = 128": lambda: _completion(stop_token_ids=list(range(1000)) * 1000, n=128),
    "100,000 allowed token ids, n = 128": lambda: _completion(allowed_token_ids=list(range(1000)) * 100, n=128),
    "a million messages that are none": lambda: _chat(messages=[1] * 1_000_000),
    "100,000 empty messages": lambda: _chat(messages=[{"role": "user", "content": ""}] * 100_000),
    "a million logit biases": lambda: _completion(logit_bias={str(i): 1 for i in range(1_000_000)}),
    "100,000 items of a response": lambda: (RESPONSES, _text({"input": [{"role": "user", "content": "a"}] * 100_000})),
    "10 MB of DRY breakers": lambda: _completion(dry_multiplier=1, dry_sequence_breakers=["ab" * 500] * 10_000),
    "12 MB of tool arguments": lambda: _chat(messages=_call(_text({"a": "b" * 12_000_000}).decode())),
    "12 MB of broken tool arguments": lambda: _chat(messages=_call("{" * 12_000_000)),
    "a prompt of 100 MB": lambda: _completion(prompt="once upon a time " * 6_000_000),
    "a chat of 100 MB": lambda: _chat(messages=[{"role": "user", "content": "word " * 20_000_000}]),
    "100 MB of white space": lambda: (COMPLETIONS, b" " * 100_000_000 + b"{}"),
    "10 MB of brackets": lambda: (COMPLETIONS, b'{"prompt":' + b"[" * 10_000_000),
    "a million token ids": lambda: _completion(prompt=[1] * 1_000_000),
    "10,000 bad words": lambda: _completion(bad_words=[f"word{i}" for i in range(10_000)]),
    "10,000 embeddings": lambda: ("/v1/embeddings", _text({"input": ["a b c"] * 10_000})),
    "a name of 10 MB": lambda: _completion(model="m" * 10_000_000),
    "3.9 MB, truncated to 8 tokens": lambda: _completion(prompt=LONG, truncate_prompt_tokens=8),
    "3.9 MB to tokenize": lambda: (TOKENIZE, _text({"prompt": LONG})),
    "3.9 MB to count": lambda: (
        "/v1/messages/count_tokens", _text({"model": "", "messages": [{"role": "user", "content": LONG}]})
    ),
    "10 MB to detokenize": lambda: ("/detokenize", _text({"tokens": [1] * 3_000_000})),
    "10 MB of unknown fields": lambda: _completion(**{f"field{i}": i for i in range(600_000)}),
}  # fmt: skip
SERVED = ("12 MB of tool arguments", "3.9 MB, truncated to 8 tokens")  # all other bodies are refused


def _send(make: Callable[[], tuple[str, bytes]]) -> Callable[[Target], Awaitable[Statuses]]:
    async def run(target: Target) -> Statuses:
        path, body = make()
        return _statuses([await target.post(path, body) for _ in range(2)])

    return run


async def hostile_grammars(target: Target) -> Statuses:
    async def post(name: str) -> Answer:
        made = HOSTILE[name]()
        if isinstance(made, str):
            return await target.post(COMPLETIONS, made.encode())
        path, common = (CHAT, {"messages": USER}) if "tools" in made else (COMPLETIONS, {"prompt": "a"})
        return await target.post(path, _text({**common, "max_tokens": 30, **made}))

    return _statuses(await asyncio.gather(*map(post, HOSTILE)))


async def burst(target: Target) -> Statuses:
    """800 requests at once."""
    path, body = _completion(max_tokens=4)
    return _statuses(await asyncio.gather(*(target.post(path, body) for _ in range(800))))


async def large_bodies(target: Target) -> Statuses:
    """Forty bodies of 3.9 MB at once, which threads decode and tokenize."""
    bodies = [BODIES[name]() for name in ("3.9 MB, truncated to 8 tokens", "3.9 MB to tokenize")]
    return _statuses(await asyncio.gather(*(target.post(*bodies[index % 2]) for index in range(40))))


async def invented_users(target: Target) -> Statuses:
    """Requests of 160 users who are one client, at an address other than that of the client who waits."""
    elsewhere = replace(target, source="127.0.0.2")
    bodies = [_completion(max_tokens=60, ignore_eos=True, user=f"user {number}") for number in range(160)]
    return _statuses(await asyncio.gather(*(elsewhere.post(*body) for body in bodies)))


async def hang_ups(target: Target) -> Statuses:
    """Clients that leave at once, or in the middle of a stream."""

    async def leave(stream: bool) -> int:
        path, body = _completion(max_tokens=400, ignore_eos=True, stream=stream, n=4)
        reader, writer = await target.connect()
        writer.write(target.request("POST", path, body))
        with suppress(ConnectionError):
            await writer.drain()
            if stream:
                await reader.read(100)
        writer.close()
        return 0

    return Counter(await asyncio.gather(*(leave(index % 2 == 0) for index in range(100))))


# ---- connections ----


async def pipelining(target: Target) -> Statuses:
    """Four connections on which 1,000 requests are sent at once."""
    last = target.request("GET", "/v1/models")
    requests = last.replace(b"Connection: close\r\n", b"") * 999 + last
    answers = await asyncio.gather(*(target.send(requests) for _ in range(4)))
    statuses = [int(status) for answer in answers for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer.received)]
    return Counter(statuses) + Counter({0: 4000 - len(statuses)})


async def _held(target: Target, count: int, first: bytes, drip: bytes, seconds: float) -> Statuses:
    """Connections that send `first`, then `drip` each half second."""

    async def hold() -> int:
        try:
            reader, writer = await target.connect()
        except OSError:
            return 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    writer.write(first)
                    first_bytes = asyncio.create_task(reader.read(100))
                    while not first_bytes.done():
                        await asyncio.wait([first_bytes], timeout=0.5)
                        if drip and not first_bytes.done():
                            writer.write(drip)
                    return int(first_bytes.result().split(b" ")[1]) if first_bytes.result() else 0
        except TimeoutError:
            return HANGS
        except OSError:
            return 0
        finally:
            writer.close()

    return Counter(await asyncio.gather(*(hold() for _ in range(count))))


async def slow_headers(target: Target) -> Statuses:
    return await _held(target, 200, b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X-A: b\r\n", 60)


async def slow_bodies(target: Target) -> Statuses:
    head = target.request("POST", COMPLETIONS).replace(b"Content-Length: 0", b"Content-Length: 1000") + b"{"
    return await _held(target, 200, head, b" ", 90)


async def idle_connections(target: Target) -> Statuses:
    """5,000 sockets that say nothing."""
    return await _held(target, 5000, b"", b"", 20)


async def slow_readers(target: Target) -> Statuses:
    """64 streams without a reader, whose answers must not hold blocks for ever."""

    async def unread() -> int:
        path, body = _completion(max_tokens=400, ignore_eos=True, stream=True, n=8, logprobs=5)
        _, writer = await target.connect()
        writer.write(target.request("POST", path, body))
        await writer.drain()
        await asyncio.sleep(20)
        writer.transport.abort()
        return 0

    return Counter(await asyncio.gather(*(unread() for _ in range(64))))


async def large_headers(target: Target) -> Statuses:
    bombs = [
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X-A: b\r\n" * 4_000_000,
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: " + b"b" * 100_000_000,
        b"GET /" + b"a" * 30_000_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: b\r\n" % i for i in range(100_000)) + b"\r\n",
    ]
    return _statuses([await target.send(bomb, 60) for bomb in bombs])


async def endless_body(target: Target) -> Statuses:
    """Chunks without an end."""
    head = target.request("POST", COMPLETIONS).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    return _statuses([await target.send(head + chunk * 3000, 60)])


async def smuggling(target: Target) -> Statuses:
    """Two lengths, broken chunks, broken first lines, bytes that are no HTTP: nothing of it may be served."""
    head = target.request("POST", COMPLETIONS).replace(b"Content-Length: 0\r\n\r\n", b"")
    body = b'{"prompt": "a", "max_tokens": 1}'
    requests = [
        head
        + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"0\r\n\r\nGET /x HTTP/1.1\r\nHost: localhost\r\n\r\n",
        head + b"Content-Length: 5\r\nContent-Length: 32\r\n\r\n" + body,
        head + b"Content-Length: -1\r\n\r\n" + body,
        head + b"Content-Length: 99999999999999999999\r\n\r\n" + body,
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
        head + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n" + body,
        head + b"Transfer-Encoding: xchunked\r\nContent-Length : 32\r\n\r\n" + body,
        b"GET  /health HTTP/9.9\r\n\r\n",
        b"\x00" * 1000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xff" * 500 + b"\r\n\r\n",
        bytes(random.Random(0).randbytes(100_000)) + b"\r\n\r\n",
    ]
    return _statuses([await target.send(each, 10) for each in requests])


PATHS = [
    "/static/../../etc/passwd", "/static/%2e%2e/%2e%2e/etc/passwd", "/static/..%2f..%2fserver/app.py",
    "/static//etc/passwd",
    "/static/%00", "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fconfig.json", "//etc/passwd",
    "/static/..\\..\\app.py",
]  # fmt: skip


async def traversal(target: Target) -> Statuses:
    answers = [await target.send(target.request("GET", path)) for path in PATHS]
    assert not any(b"root:" in answer.body or b"create_app" in answer.body for answer in answers)
    return _statuses(answers)


async def rebinding(target: Target) -> Statuses:
    """Pages of other sites that drive a server on this machine: by a name of theirs, or with requests that need no
    leave.
    """
    path, body = _completion()
    return _statuses(
        [
            await target.post(path, body, Host="evil.example"),
            await target.send(target.request("GET", "/v1/models", Host="evil.example:8000")),
            await target.post(path, body, Content_Type="text/plain", Origin="https://evil.example"),
        ]
    )


async def broken_json(target: Target) -> Statuses:
    """Bodies that are nearly right, for some seconds."""
    bodies = [
        _completion(max_tokens=2),
        _chat(max_tokens=2),
        (RESPONSES, _text({"input": "a", "max_output_tokens": 2})),
    ]
    bodies += [(TOKENIZE, _text({"prompt": "a"})), ("/v1/embeddings", _text({"input": "a"}))]
    bodies += [("/v1/messages", _text({"model": "demo", "messages": USER, "max_tokens": 2}))]
    broken, deadline = Broken(0, bodies), asyncio.get_running_loop().time() + 20
    found: Statuses = Counter()

    async def run() -> None:
        while asyncio.get_running_loop().time() < deadline:
            path, _, body = broken.make()
            found[(await target.post(path, body)).status] += 1

    await asyncio.gather(*(run() for _ in range(8)))
    return found


ATTACKS = (
    *(Attack(name, _send(make), refused=name not in SERVED) for name, make in BODIES.items()),
    Attack("29 hostile grammars", hostile_grammars),
    Attack("a burst of 800 requests", burst),
    Attack("40 large bodies at once", large_bodies),
    Attack("160 invented users", invented_users, keyless=True),
    Attack("pipelined requests", pipelining),
    Attack("100 clients that hang up", hang_ups),
    Attack("200 slow headers", slow_headers, refused=True),
    Attack("200 slow bodies", slow_bodies, refused=True),
    Attack("5,000 idle connections", idle_connections),
    Attack("64 streams that are not read", slow_readers),
    Attack("100 MB of headers", large_headers, refused=True),
    Attack("a body without end", endless_body, refused=True),
    Attack("smuggling", smuggling, refused=True),
    Attack("paths outside", traversal, refused=True),
    Attack("pages of other sites", rebinding, refused=True, keyless=True),
    Attack("broken JSON", broken_json),
    Attack("images: 900 megapixels in 1 MB", lambda t: images.in_turn(t, images.bombs()), refused=True, images=True),
    Attack("images: the largest one", lambda t: images.in_turn(t, [images.largest()]), images=True),
    Attack("images: 10,000 x 1", images.narrow, refused=True, images=True),
    Attack("images: damaged files", lambda t: images.in_turn(t, images.damaged()), refused=True, images=True),
    Attack("images: polyglots", lambda t: images.in_turn(t, images.polyglots()), refused=True, images=True),
    Attack("images: 500 frames", lambda t: images.in_turn(t, [images.animated()]), images=True),
    Attack("images: much metadata", lambda t: images.in_turn(t, images.much_metadata()), images=True),
    Attack("images: URLs of this machine", images.from_this_machine, refused=True, images=True),
    Attack("images: redirects", images.redirects, refused=True, images=True),
    Attack("images: names that change", images.names_that_change, refused=True, images=True),
    Attack("images: 200 at once", images.many_at_once, images=True),
    Attack("images: 200 in a request", images.many_in_one, refused=True, images=True),
    *(
        Attack(f"videos: {name}", partial(images.ask_about_videos, files=files), refused, images=True)
        for name, files, refused in (
            ("10,000 frames", images.many_frames, True),
            ("too many pixels", images.large_videos, True),
            ("the largest one", images.largest_video, False),
            ("damaged files", images.damaged_videos, True),
        )
    ),
)
