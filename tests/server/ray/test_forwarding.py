"""A request's way through an ingress to the application of a replica, and its response's way back. Ray is not
needed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from engine.replicas.routing import CHUNK_TOKENS, Router
from server.app import create_app
from server.deploy_ray.forwarded import MAX_TEXT_BYTES, TOKEN_BYTES, ForwardedRequest, forwarded, prompt_tokens
from server.deploy_ray.ingress import MAX_BODY_BYTES, OpenAiIngress
from server.deploy_ray.replica import MAX_WAITING, LLMServer
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine


class Handle:
    """A handle of a deployment with one replica."""

    def __init__(self, respond: Callable[[ForwardedRequest], AsyncGenerator[Any, None]]) -> None:
        self._respond = respond
        self.num_cancelled = 0

    def options(self, **options: Any) -> Handle:
        assert options == {"stream": True, "method_name": "respond"}
        return self

    def remote(self, request: ForwardedRequest) -> Answer:
        return Answer(self, self._respond(request))


class Answer:
    def __init__(self, handle: Handle, pieces: AsyncGenerator[Any, None]) -> None:
        self._handle, self._pieces = handle, pieces

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._pieces)

    def cancel(self) -> None:
        self._handle.num_cancelled += 1


def fake(answer: str = "one") -> FakeEngine:
    engine = FakeEngine()
    engine.answer = answer
    return engine


class Loaded(LLMServer):
    """A replica, without an engine that has to be loaded or closed."""

    def __init__(self, engine: FakeEngine, name: str, **settings: Any) -> None:
        self._engine = engine  # type: ignore[assignment]
        self._app = create_app(engine, ServerConfig(**settings), served_model_names=[name], log_stats=False)

    def __del__(self) -> None:
        pass


def client(handles: dict[str, Handle]) -> httpx.AsyncClient:
    ingress = OpenAiIngress(handles, 60)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await ingress(Request(scope, receive))
        await response(scope, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


def completion(model: str | None = None, **more: Any) -> dict[str, Any]:
    return {"prompt": "Once", "max_tokens": 5, **({} if model is None else {"model": model}), **more}


def test_each_model_answers_for_itself() -> None:
    async def test() -> None:
        first, second = fake("one"), fake("two")
        handles = {"a": Handle(Loaded(first, "a").respond), "org/b": Handle(Loaded(second, "org/b").respond)}
        async with client(handles) as http:
            for model, text in (("a", "one"), ("org/b", "two"), (None, "one")):
                answer = (await http.post("/v1/completions", json=completion(model))).json()
                assert answer["choices"][0]["text"] == text
            listed = (await http.get("/v1/models")).json()
            assert [each["id"] for each in listed["data"]] == ["a", "org/b"]
            assert (await http.get("/v1/models/org/b")).json()["id"] == "org/b"
            unknown = await http.post("/v1/completions", json=completion("c"))
            assert unknown.status_code == 404
            assert "c" in unknown.json()["error"]["message"]
            wrong = await http.post("/v1/completions", content=b"{")
            assert wrong.status_code == 400
            assert (await http.get("/health")).status_code == 200

    asyncio.run(test())


def test_a_stream_comes_event_by_event() -> None:
    async def test() -> None:
        handle = Handle(Loaded(fake("a b c d e f"), "a").respond)
        async with client({"a": handle}) as http:
            response = await http.post("/v1/completions", json=completion(stream=True))
            assert response.headers["content-type"].startswith("text/event-stream")
            events = [line for line in response.text.splitlines() if line]
            assert events[-1] == "data: [DONE]"
            assert len(events) > 2
        assert handle.num_cancelled == 1, "which ends what is left of it"

    asyncio.run(test())


def test_keys_are_asked_for() -> None:
    async def test() -> None:
        handles = {name: Handle(Loaded(FakeEngine(), name, api_key=("sesame",)).respond) for name in "ab"}
        async with client(handles) as http:
            assert (await http.get("/v1/models")).status_code == 401
            found = await http.get("/v1/models", headers={"Authorization": "Bearer sesame"})
            assert len(found.json()["data"]) == 2
            assert (await http.get("/readyz")).status_code == 200

    asyncio.run(test())


def test_a_reader_that_hangs_up_ends_the_request() -> None:
    async def test() -> None:
        engine = fake("x" * 400)
        engine.holds_after = 3
        body = json.dumps(completion(stream=True, max_tokens=400)).encode()
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        answer = Loaded(engine, "a").respond(forwarded(scope, body))
        assert (await anext(answer))[0] == 200  # type: ignore[index]
        await anext(answer)
        assert engine.active
        await answer.aclose()
        assert not engine.active
        assert all(length < 400 for length in engine.ended.values())

    asyncio.run(test())


def test_a_lost_replica_is_an_error() -> None:
    async def lost_at_once(request: ForwardedRequest) -> AsyncGenerator[Any, None]:
        raise RuntimeError("the actor died")
        yield

    async def lost_later(request: ForwardedRequest) -> AsyncGenerator[Any, None]:
        yield 200, [(b"content-type", b"text/event-stream"), (b"x-request-id", b"twice")]
        yield b"data: 1\n\n"
        raise RuntimeError("the actor died")

    async def test() -> None:
        async with client({"a": Handle(lost_at_once)}) as http:
            refused = await http.post("/v1/completions", json=completion())
            assert refused.status_code == 503
            assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        async with client({"a": Handle(lost_later)}) as http:
            broken = await http.post("/v1/completions", json=completion())
            first, last = broken.text.strip().split("\n\n")
            assert first == "data: 1"
            assert "was lost" in json.loads(last[6:])["error"]["message"]
            assert "x-request-id" not in broken.headers

    asyncio.run(test())


def test_a_body_that_is_too_large_reaches_no_replica() -> None:
    async def test() -> None:
        async with client({"a": Handle(lambda request: pytest.fail("it does"))}) as http:
            refused = await http.post("/v1/completions", content=bytes(MAX_BODY_BYTES + 1))
            assert refused.status_code == 413

    asyncio.run(test())


@pytest.mark.parametrize(("ends", "status"), [("never", 408), ("by hanging up", 499)])
def test_a_body_that_does_not_arrive_reaches_no_replica(ends: str, status: int) -> None:
    messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    if ends == "by hanging up":
        messages.append({"type": "http.disconnect"})

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        return await asyncio.Event().wait()

    async def test() -> None:
        ingress = OpenAiIngress({"a": Handle(lambda request: pytest.fail("it does"))}, 0.01)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        response = await asyncio.wait_for(ingress(Request(scope, receive)), 60)
        assert response.status_code == status
        assert ingress._arrivals._num_held_bytes == 0

    asyncio.run(test())


def asked(**body: Any) -> ForwardedRequest:
    return forwarded({"type": "http", "path": "/v1/chat/completions"}, json.dumps(body).encode())


def test_a_conversation_goes_on_where_it_began() -> None:
    router = Router(3, 100_000)
    said = [{"role": "user", "content": "Tell me of the sea. " * 60}]
    first = asked(messages=said, model="m", stream=True)
    assert first.num_tokens == pytest.approx(320, abs=40)
    router.assign("first", 2, first.num_tokens, first.chunk_names)
    router.end("first")
    more = asked(model="m", messages=[*said, {"role": "assistant", "content": "It is wide."}], max_tokens=9)
    assert router.ranked(more.chunk_names, range(3))[0] == 2
    apart = asked(messages=said, cache_salt="another's")
    assert not set(apart.chunk_names) & set(first.chunk_names)


@pytest.mark.parametrize("body", [b"", b"[1]", b"nonsense", b'{"model": 5, "messages": 7}', b"[" * 100_000])
def test_bodies_that_say_nothing_are_forwarded(body: bytes) -> None:
    request = forwarded({"type": "http", "path": "/", "app": object()}, body)
    assert request.body == body
    assert request.model is None
    assert "app" not in request.scope
    assert request.num_tokens < CHUNK_TOKENS


def test_an_app_waits_for_a_reader_that_takes_nothing() -> None:
    class Endless(Loaded):
        sent = 0

        def __init__(self) -> None:
            self._app = self._stream  # type: ignore[assignment]

        async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                self.sent += 1
                await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async def test() -> None:
        replica = Endless()
        answer = replica.respond(forwarded({"type": "http", "path": "/"}, b""))
        assert (await anext(answer))[0] == 200  # type: ignore[index]
        for _ in range(200):
            await asyncio.sleep(0)
        assert replica.sent == MAX_WAITING + 1
        await asyncio.wait_for(answer.aclose(), 60)

    asyncio.run(test())


def test_no_more_of_a_long_prompt_is_looked_at_than_is_kept() -> None:
    assert TOKEN_BYTES * len(prompt_tokens({"prompt": "x" * (MAX_TEXT_BYTES + 100), "input": "y"})) == MAX_TEXT_BYTES
