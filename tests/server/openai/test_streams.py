"""Streams: the exact bytes of each event, errors inside, comments, and what happens when clients hang up."""

import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from server.settings import ServerConfig
from tests.support.fake_engine import ANSWER, FakeEngine
from tests.support.live_server import Live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def raw_stream(live: Live, path: str, **body: Any) -> bytes:
    """All bytes of a streamed answer, its id and times replaced."""
    body = {"stream": True, **({"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}), **body}
    response = live.post(path, **body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert len(set(re.findall(rb'"id":"[^"]*"', response.content))) <= 1, "one id in all chunks"
    data = re.sub(rb'"id":"((?:chat)?cmpl)-\w{32}"', rb'"id":"\1-X"', response.content)
    data = re.sub(rb',"metrics":\{"queue_time_ms":[^{}]*\}', b',"metrics":{}', data)
    return re.sub(rb'"created":\d+', b'"created":1', data)


def chunks(data: bytes) -> list[Any]:
    """The JSON of each event; checks that every event is one line, and that the last is [DONE]."""
    assert data.endswith(b"data: [DONE]\n\n")
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith(("data: ", ": ")) and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1] if event.startswith("data: ")]


CHAT_HEAD = 'data: {"id":"chatcmpl-X","object":"chat.completion.chunk","created":1,"model":"toy","choices":['
TEXT_HEAD = 'data: {"id":"cmpl-X","object":"text_completion","created":1,"model":"toy","choices":['


def test_chat_bytes(live: Live) -> None:
    assert raw_stream(live, CHAT, max_tokens=6).decode() == (
        CHAT_HEAD + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHAT_HEAD + '{"index":0,"delta":{"content":"G"},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHAT_HEAD + '{"index":0,"delta":{"content":"r"},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHAT_HEAD + '{"index":0,"delta":{"content":"ü"},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHAT_HEAD
        + '{"index":0,"delta":{"content":"ß"},"logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n'
        + "data: [DONE]\n\n"
    )  # fmt: skip


def test_completion_bytes(live: Live) -> None:
    assert raw_stream(live, COMPLETIONS, max_tokens=3, echo=True).decode() == (
        TEXT_HEAD + '{"index":0,"text":"HiG","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        + TEXT_HEAD + '{"index":0,"text":"r","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        + TEXT_HEAD + '{"index":0,"text":"\ufffd","logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n'
        + "data: [DONE]\n\n"
    )  # fmt: skip


def test_usage_chunk(live: Live) -> None:
    usage = '{"prompt_tokens":2,"total_tokens":4,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}'
    data = raw_stream(live, COMPLETIONS, max_tokens=2, stream_options={"include_usage": True}).decode()
    end = TEXT_HEAD.removesuffix("[") + '[],"usage":' + usage + ',"metrics":{}}\n\ndata: [DONE]\n\n'
    assert data.endswith(end)
    assert data.count("usage") == 1
    assert "usage" not in raw_stream(live, CHAT, max_tokens=2, stream_options={"include_usage": False}).decode()
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path in (CHAT, COMPLETIONS):
        found = chunks(raw_stream(live, path, max_tokens=3, ignore_eos=True, stream_options=options))
        assert all("usage" in chunk for chunk in found)
        assert found[-1]["usage"]["completion_tokens"] == 3
        assert found[-2]["usage"]["completion_tokens"] == 3
        assert found[-1]["choices"] == []


def test_warnings_come_once_though_the_first_character_is_several_tokens(live: Live) -> None:
    for path in (CHAT, COMPLETIONS):
        found = chunks(raw_stream(live, path, max_tokens=9, seed=2, colour="blue"))
        assert [chunk["warnings"] for chunk in found if "warnings" in chunk] == [
            ["colour: is not a field of this request; ignored"]
        ]
        assert "".join(text_of(chunk["choices"][0]) for chunk in found).startswith("üße!")


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


def test_stream_equals_whole(live: Live) -> None:
    for path in (CHAT, COMPLETIONS):
        for body in ({"max_tokens": 99}, {"max_tokens": 99, "stop": "plus zwei"}, {"max_tokens": 99, "logprobs": 1}):
            body = {**body, "logprobs": True, "top_logprobs": 2} if path == CHAT and "logprobs" in body else body
            found = [chunk["choices"][0] for chunk in chunks(raw_stream(live, path, **body))]
            whole = (live.chat if path == CHAT else live.complete)(**body).json()["choices"][0]
            if path == CHAT:
                assert "".join(choice["delta"]["content"] for choice in found) == whole["message"]["content"]
                logprobs = [entry for choice in found if choice["logprobs"] for entry in choice["logprobs"]["content"]]
                assert logprobs == (whole["logprobs"]["content"] if whole["logprobs"] else [])
            else:
                assert "".join(choice["text"] for choice in found) == whole["text"]
                for field in ("tokens", "text_offset", "top_logprobs", "token_logprobs"):
                    parts = [part for choice in found if choice["logprobs"] for part in choice["logprobs"][field]]
                    assert parts == (whole["logprobs"][field] if whole["logprobs"] else [])
            assert [choice["finish_reason"] for choice in found[:-1]] == [None] * (len(found) - 1)
            assert (found[-1]["finish_reason"], found[-1]["stop_reason"]) == (
                whole["finish_reason"],
                whole["stop_reason"],
            )


def test_token_ids_in_streams(live: Live) -> None:
    for path in (CHAT, COMPLETIONS):
        found = chunks(raw_stream(live, path, max_tokens=9, return_token_ids=True, stop="e!"))
        choices = [chunk["choices"][0] for chunk in found]
        prompts = [chunk["prompt_token_ids"] for chunk in found if "prompt_token_ids" in chunk]
        prompts += [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
        assert prompts == [live.engine.requests[-1][1]]
        ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
        assert live.engine.tokenizer is not None
        assert live.engine.tokenizer.decode(ids) == "Grüße!"


def test_token_ids_of_a_prompt_come_with_the_first_text(live: Live) -> None:
    """A held-back beginning of a stop string is an update without text."""
    found = chunks(raw_stream(live, COMPLETIONS, max_tokens=9, return_token_ids=True, stop="Gx"))
    choices = [chunk["choices"][0] for chunk in found]
    assert choices[0]["text"] == "Gr"
    prompts = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
    assert prompts == [choices[0]["prompt_token_ids"]] == [live.engine.requests[-1][1]]


def test_scores_of_a_prompt_come_first(live: Live) -> None:
    found = chunks(raw_stream(live, COMPLETIONS, prompt="abc", echo=True, logprobs=1, max_tokens=2))
    first = found[0]["choices"][0]
    assert (first["text"], first["logprobs"]["tokens"]) == ("abcG", ["a", "b", "c", "G"])
    assert first["logprobs"]["token_logprobs"] == [None, -1, -2, -0.5]
    options = {"include_usage": True}
    found = chunks(
        raw_stream(live, COMPLETIONS, prompt="abc", echo=True, logprobs=1, max_tokens=0, stream_options=options)
    )
    assert found[0]["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert found[0]["choices"][0]["finish_reason"] == "length"
    assert found[-1]["usage"]["completion_tokens"] == 0


def test_samples_are_interleaved(live: Live) -> None:
    live.engine.delay = 0.005
    found = chunks(raw_stream(live, CHAT, n=3, max_tokens=30, stream_options={"include_usage": True}))
    choices = [chunk["choices"][0] for chunk in found[:-1]]
    order = [choice["index"] for choice in choices]
    assert order != sorted(order)
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in own) == ANSWER.encode()[:30].decode()
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
    assert found[-1]["usage"]["completion_tokens"] == 90
    found = chunks(raw_stream(live, COMPLETIONS, prompt=["a", "b"], n=2, echo=True, max_tokens=1))
    assert sorted((c["choices"][0]["index"], c["choices"][0]["text"]) for c in found) == [
        (0, "aG"),
        (1, "aG"),
        (2, "bG"),
        (3, "bG"),
    ]


def test_updates_that_wait_together_are_one_event(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that the engine merges while a client is slow stay merged."""
    original = live.engine.generate

    async def merged(*args: Any, **options: Any) -> Any:
        held = [update async for update in original(*args, **options)]
        first, last = held[0], held[-1]
        yield type(first)(
            "".join(update.text for update in held),
            [token for update in held for token in update.token_ids],
            None,
            last.finish_reason,
            last.stop_reason,
            0,
            last.timings,
        )

    monkeypatch.setattr(live.engine, "generate", merged)
    found = chunks(raw_stream(live, CHAT))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in found] == ["", ANSWER]


def test_errors_inside(live: Live) -> None:
    live.engine.fail_after = 3
    for path in (CHAT, COMPLETIONS):
        data = raw_stream(live, path, max_tokens=9)
        error = chunks(data)[-1]["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert (error["type"], error["code"]) == ("InternalServerError", 500)
    live.engine.fail_after, live.engine.die_after = None, 2
    error = chunks(raw_stream(live, CHAT, n=2))[-1]["error"]
    assert error["code"] == 500
    assert "SIGKILL" in error["message"]
    live.wait_idle()


def test_own_mistake_inside(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: Any, **options: Any) -> Any:
        raise KeyError("secret")
        yield

    monkeypatch.setattr(live.engine, "generate", broken)
    for n in (1, 2):
        (chunk,) = chunks(raw_stream(live, CHAT, n=n))
        assert chunk["error"]["code"] == 500
        assert "secret" not in chunk["error"]["message"]


def test_bad_requests_are_no_streams(live: Live) -> None:
    response = live.chat(stream=True, temperature=-1)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


def test_comments_while_nothing_comes(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), ServerConfig(sse_keep_alive_interval=0.05))
    live.engine.holds_after = 1
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 2}
    with live.http.stream("POST", CHAT, json=body) as response:
        data = b""
        for part in response.iter_raw():
            data += part
            if data.endswith(b": keep-alive\n\n"):
                live.engine.holds_after = None
    assert data.count(b": keep-alive\n\n") >= 1
    assert len(chunks(data)) == 3
    live = serve(FakeEngine(delay=0.2), ServerConfig(sse_keep_alive_interval=0))
    assert b"keep-alive" not in raw_stream(live, CHAT, max_tokens=2)


def send_raw(live: Live, path: str, **body: Any) -> socket.socket:
    content = json.dumps({"messages": MESSAGES, **body} if path == CHAT else {"prompt": "Hi", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=60)
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 3])
def test_clients_that_hang_up_end_their_requests(live: Live, path: str, stream: bool, n: int, reset: bool) -> None:
    live.engine.holds_after = 3
    connection = send_raw(live, path, stream=stream, n=n, max_tokens=400, ignore_eos=True)
    if stream:
        assert b"200 OK" in connection.recv(4096)
    while len(live.engine.active) < n:
        time.sleep(0.002)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    live.wait_idle()
    assert len(live.engine.ended) == n
    assert all(tokens < 400 for tokens in live.engine.ended.values())


def test_many_clients_half_of_which_hang_up(live: Live) -> None:
    live.engine.delay = 0.005
    rng = random.Random(0)
    finished: list[bytes] = []

    def client(leaves: bool) -> None:
        with send_raw(live, rng.choice([CHAT, COMPLETIONS]), stream=True, max_tokens=60, ignore_eos=True) as connection:
            data = b""
            while part := connection.recv(2048):
                data += part
                if (leaves and len(data) > 1500) or data.endswith(b"0\r\n\r\n"):
                    break
            if not leaves:
                finished.append(data)

    threads = [threading.Thread(target=client, args=(number % 2 == 0,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live.wait_idle()
    assert len(finished) == 20
    assert all(b"data: [DONE]\n\n" in data and b'"finish_reason":"length"' in data for data in finished)
    assert len(live.engine.ended) == 40


def test_a_stream_that_waits_to_begin_can_be_left(live: Live) -> None:
    live.engine.holds = True
    connection = send_raw(live, CHAT, stream=True)
    while not live.engine.active:
        time.sleep(0.002)
    connection.close()
    live.wait_idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_requests_can_be_aborted_by_id(live: Live, path: str, stream: bool) -> None:
    live.engine.holds_after = 3
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    request_id = ("chatcmpl-" if path == CHAT else "cmpl-") + "mine.1"
    found: list[Any] = []

    def client() -> None:
        options = {"stream": stream, "n": 2, "max_tokens": 400, "ignore_eos": True, "request_id": "mine.1"}
        response = live.post(path, **body, **options)
        found.extend(chunks(response.content) if stream else [response.json()])

    thread = threading.Thread(target=client)
    thread.start()
    while len(live.engine.active) < 2 or min(map(len, live.engine.active.values())) < 3:
        time.sleep(0.002)
    again = live.post(path, **body, request_id="mine.1")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "request_id")
    response = live.http.post(f"/v1/requests/{request_id}/abort")
    assert (response.status_code, response.json()) == (200, {"id": request_id, "aborted": True})
    thread.join()
    ends = [choice["finish_reason"] for chunk in found for choice in chunk["choices"] if choice["finish_reason"]]
    assert ends == ["abort", "abort"]
    assert {chunk["id"] for chunk in found} == {request_id}
    live.wait_idle()
    assert all(tokens < 400 for tokens in live.engine.ended.values())
    response = live.http.post(f"/v1/requests/{request_id}/abort")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "NotFoundError")
    live.engine.holds_after = None
    assert live.post(path, **body, request_id="mine.1").status_code == 200, "an id is free when its request has ended"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": 1}),
        (COMPLETIONS, {"prompt": "Hi", "echo": True, "logprobs": 1}),
        (COMPLETIONS, {"prompt": "Hi", "echo": True, "logprobs": 1, "stream": True}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}),
    ],
)
def test_log_probabilities_of_prompts_are_written_in_a_thread(
    live: Live, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """A long prompt's take a second, for which no other request may wait."""
    tokenizer, seen = live.engine.tokenizer, []
    assert tokenizer is not None
    token_text = tokenizer.token_text

    def watched(token_id: int) -> str:
        seen.append(threading.current_thread().name)
        return token_text(token_id)

    monkeypatch.setattr(tokenizer, "token_text", watched)
    assert live.post(path, **body if "token_ids" in body else {**body, "max_tokens": 1}).status_code == 200
    assert seen
    assert all(name.startswith("worker") for name in seen)
