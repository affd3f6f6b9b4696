"""Requests of older and particular clients: HTTP/1.0, compressed bodies, preflights of private networks, empty
values.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from server.http.sse import EventStream, event
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def of_http_1_0(live: Live, body: dict[str, Any]) -> tuple[bytes, bytes]:
    """Headers and body of the answer."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    headers, _, found = answer.partition(b"\r\n\r\n")
    return headers.lower(), found


def test_http_1_0_knows_no_chunks(live: Live) -> None:
    headers, body = of_http_1_0(live, {"messages": MESSAGES, "stream": True, "max_tokens": 3})
    assert b"transfer-encoding" not in headers
    assert headers.count(b"\r\nconnection: ") == 1
    lines = body.decode().split("\n\n")
    assert all(line.startswith("data: ") for line in lines[:-1])
    assert lines[-2:] == ["data: [DONE]", ""]
    headers, body = of_http_1_0(live, {"messages": MESSAGES, "max_tokens": 3})
    assert json.loads(body)["object"] == "chat.completion"
    with live.http.stream("POST", CHAT, json={"messages": MESSAGES, "stream": True, "max_tokens": 3}) as response:
        assert response.headers["transfer-encoding"] == "chunked"
        assert "connection" not in response.headers


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP"])
def test_compressed_bodies_are_named(live: Live, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    response = live.http.post(CHAT, content=gzip.compress(json.dumps({"messages": MESSAGES}).encode()), headers=headers)
    assert response.status_code == 415
    assert encoding.lower() in response.json()["error"]["message"]
    assert response.headers["accept-encoding"] == "identity"
    headers["Content-Encoding"] = "identity"
    assert live.http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1}, headers=headers).status_code == 200


def test_preflights_of_private_networks(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), ServerConfig(allowed_origins=("https://app.example",)))
    headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
    allowed = live.http.options(CHAT, headers={"Origin": "https://app.example", **headers})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-private-network"] == "true"
    others = live.http.options(CHAT, headers={"Origin": "https://other.example", **headers})
    assert others.status_code == 400
    assert "access-control-allow-private-network" not in others.headers


def test_the_list_of_models_with_a_slash(live: Live) -> None:
    assert live.http.get("/v1/models/").json() == live.http.get("/v1/models").json()


@pytest.mark.parametrize(
    "values",
    [
        {"logprobs": False, "top_logprobs": 0},
        {"top_logprobs": 0},
        {"top_p": 0},
        {"model": ""},
        {"stop": ""},
        {"stop": ["", "zzz"]},
        {"stop": []},
    ],
)
def test_values_that_openai_takes(live: Live, values: dict[str, Any]) -> None:
    response = live.post(CHAT, messages=MESSAGES, max_tokens=3, **values)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "toy"
    assert response.json()["choices"][0]["message"]["content"] == "Gr"[:2] + "\ufffd"


def test_all_log_probabilities_are_those_that_the_server_gives(live: Live) -> None:
    body = live.post(CHAT, messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=-1).json()
    assert len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 5
    assert body["warnings"] == ["top_logprobs: -1 asks for all tokens: the server returns at most 5 (--max-logprobs)"]
    body = live.post("/v1/completions", prompt="Hi", max_tokens=2, prompt_logprobs=-1, logprobs=-1).json()
    assert len(body["choices"][0]["prompt_logprobs"][1]) in (5, 6)
    assert [each.partition(":")[0] for each in body["warnings"]] == ["logprobs", "prompt_logprobs"]
    assert live.post(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=-2).status_code == 400


def test_comments_come_only_when_the_stream_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's benchmark client ends at one, so a stream that flows has none. The clock is the test's."""
    now, sent = [0.0], list[bytes]()

    async def run() -> None:
        looked = asyncio.Event()
        num_looks = 0

        def clock() -> float:
            nonlocal num_looks
            num_looks += 1
            if num_looks >= 4:
                looked.set()
            return now[0]

        monkeypatch.setattr("server.http.sse.monotonic", clock)
        ends = asyncio.Event()

        async def events() -> Any:
            yield event(b"1")
            await ends.wait()
            yield event(b"2")

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if b"keep-alive" in sent[-1]:
                ends.set()

        stream = EventStream(events(), failure=lambda error: b"", end=b"end", keep_alive=0.001)
        task = asyncio.create_task(stream({"type": "http"}, receive, send))
        await looked.wait()  # several intervals are over, but by its clock the stream has just sent an event
        assert sent == [b"", event(b"1")]
        now[0] = 1.0
        await task

    asyncio.run(run())
    assert sent == [b"", event(b"1"), b": keep-alive\n\n", event(b"2"), b"end"]
