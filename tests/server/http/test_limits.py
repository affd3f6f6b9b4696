"""Bodies that are too large are refused before work is done for it, and what is large leaves the event loop."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from server.apis.openai.chat.protocol import ChatCompletionRequest
from server.apis.openai.completions.protocol import CompletionRequest
from server.generation.workers import NUM_THREADS
from server.http import limits, reading
from server.http.errors import APIError
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, wait_until

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
MESSAGES = [{"role": "user", "content": "Hi"}]
LONG = "x" * (512 * len("<|im_start|>") + 1)  # characters of more tokens than the toy model's context
JSON = {"Content-Type": "application/json"}


def message(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    text: str = response.json()["error"]["message"]
    return text


def chunked(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 1000):
        yield body[start : start + 1000]


def test_bodies_of_too_many_bytes(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), ServerConfig(max_body_bytes=5000))
    for size, status in ((5000, 200), (5001, 413), (100_000, 413)):
        body = b'{"prompt": "a"}'.ljust(size)
        for content in (body, chunked(body)):
            response = live.http.post(COMPLETIONS, content=content, headers=JSON)
            assert response.status_code == status
            if status == 413:
                assert "at most 5000 bytes" in message(response, 413)
    assert len(live.engine.requests) == 2


def test_default_size_of_bodies_follows_the_context(live: Live) -> None:
    assert limits.default_body_bytes(1 << 20) > limits.default_body_bytes(2048) > 4 << 20
    response = live.http.post(COMPLETIONS, content=b" " * (limits.default_body_bytes(512) + 1), headers=JSON)
    assert "--max-body-bytes" in message(response, 413)


def test_clients_that_send_all_before_they_read_get_the_answer(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), ServerConfig(max_body_bytes=5000))
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(200):
            connection.sendall(chunk)
        connection.sendall(b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers = b""
        while b"HTTP/1.1 200 " not in answers:
            piece = connection.recv(65536)
            assert piece
            answers += piece
    assert answers.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_waits_to_be_asked_is_refused_at_once(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), ServerConfig(max_body_bytes=5000))
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 6000\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = b"".join(iter(lambda: connection.recv(1000), b""))  # it is closed: what comes next would be the body
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_bodies_that_do_not_arrive(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), ServerConfig(body_timeout=0.05))
    with socket.create_connection(("127.0.0.1", live.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60\r\n\r\n{")
        answer = b"".join(iter(lambda: connection.recv(1000), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.05 seconds" in answer


def test_bodies_that_arrive_together_are_bounded(serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.http.reading._MAX_HELD_BYTES", 0)
    live = serve(FakeEngine(), ServerConfig(max_body_bytes=1000))  # so it holds 4,000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 1000\r\n\r\n"
    body = b'{"prompt": "a"}'.ljust(1000)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", live.port), timeout=60))
            connection.sendall(head + body[:900])
        wait_until(lambda: live.complete("x" * 400).status_code == 503)
        response = live.complete("x" * 400)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    wait_until(lambda: live.complete("x" * 400).status_code == 200)
    for _ in range(20):  # what has been read is not counted any more
        assert live.http.post(COMPLETIONS, content=body, headers=JSON).status_code == 200
        assert live.http.post(COMPLETIONS, content=body, headers={"Content-Type": "text/plain"}).status_code == 400


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ([[]] * limits.MAX_VALUES, "more than 100000 objects, members and lists"),
        ([{}] * limits.MAX_VALUES, "more than 100000 objects, members and lists"),
        (dict.fromkeys(map(str, range(limits.MAX_VALUES)), 1), "more than 100000 objects, members and lists"),
        (json.loads("[" * limits.MAX_DEPTH + "]" * limits.MAX_DEPTH), "nested too deeply"),
    ],
)
def test_bodies_of_too_many_values(live: Live, field: Any, words: str) -> None:
    assert words in live.post(CHAT, messages=field).text


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (COMPLETIONS, "prompt"), (TOKENIZE, "unknown"), ("/v1/responses", "input"), ("/v1/embeddings", "input"),
        ("/v1/messages", "tools"),
    ],
)  # fmt: skip
def test_values_of_every_body_are_counted(live: Live, path: str, name: str) -> None:
    assert "more than 100000 objects" in live.post(path, **{name: [{}] * limits.MAX_VALUES}).text
    nested = json.loads("[" * limits.MAX_DEPTH + "]" * limits.MAX_DEPTH)
    assert "nested too deeply" in live.post(path, **{name: nested}).text


def test_values_are_counted_before_anything_is_made_of_them() -> None:
    limits.check_values([1] * (2 * limits.MAX_VALUES))  # numbers cost nothing more
    limits.check_values({"a": ["text"] * (2 * limits.MAX_VALUES)})
    limits.check_values({"a": [{}] * (limits.MAX_VALUES - 3)})
    with pytest.raises(APIError):
        limits.check_values({"a": [{}] * (limits.MAX_VALUES - 2)})


def test_values_are_counted_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    read = TypeAdapter(CompletionRequest)
    body = json.dumps({"prompt": "a", "guided_json": {"enum": [{}] * limits.MAX_VALUES}}).encode()
    with monkeypatch.context() as patch:
        patch.setattr("server.http.reading._decode", pytest.fail)
        with pytest.raises(APIError, match="more than 100000 objects"):
            reading._read(body, read, {})
    text = '{[:\\"' * limits.MAX_VALUES  # in a text they are none
    assert reading._read(json.dumps({"prompt": text}).encode(), read, {}).prompt == text


def test_the_characters_of_a_prompt_are_not_looked_at_one_by_one() -> None:
    class Text(str):
        def __iter__(self) -> Iterator[str]:
            pytest.fail("all threads of the process wait meanwhile")

    body = CompletionRequest.model_construct(prompt=Text("a" * 10))
    assert body._check_completion() is body


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatCompletionRequest, {"messages": [1] * 1000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (ChatCompletionRequest, {"messages": MESSAGES, "tools": [1] * 1000}),
        (CompletionRequest, {"prompt": [1.5] * 1000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 1000}),
        (CompletionRequest, {"prompt": "a", "guided_choice": [1] * 1000}),
    ],
)
def test_a_list_is_wrong_at_its_first_wrong_entry(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as found:
        TypeAdapter(kind).validate_python(body)
    assert found.value.error_count() == 1


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stop_token_ids", [1] * 1025, "at most 1024 entries"),
        ("allowed_token_ids", [1] * 16_385, "at most 16384 entries"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "at most 1024 entries"),
        ("bad_words", ["a"] * 513, "at most 512 entries"),
        ("dry_sequence_breakers", ["a" * 101], "at most 100 characters"),
        ("stop_token_ids", ["x" * 100_000], "integer"),
        ("prompt", ["a"] * 2049, "at most 2048 prompts, got 2049"),
        ("prompt", [[1]] * 2049, "at most 2048 prompts, got 2049"),
    ],
)
def test_lists_that_are_too_long(live: Live, field: str, value: Any, words: str) -> None:
    text = message(live.post(COMPLETIONS, **{"prompt": "a", field: value}), 400)
    assert words in text
    assert len(text) < 400
    assert not live.engine.requests


def test_each_answer_counts(live: Live) -> None:
    assert "at most 16 prompts with n=128, got 17" in message(live.complete(["a"] * 17, n=128), 400)
    assert "at most 2048 prompts" in message(live.post("/v1/embeddings", input=["a"] * 2049), 400)
    assert not live.engine.requests
    assert len(live.complete(["a"] * 16, n=128, max_tokens=1).json()["choices"]) == 2048


def test_parameters_are_checked_once_for_all_answers(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.engine.tokenizer is not None
    encode, texts = live.engine.tokenizer.encode, list[str]()

    def counted(text: str, *args: Any, **options: Any) -> list[int]:
        texts.append(text)
        return encode(text, *args, **options)

    monkeypatch.setattr(live.engine.tokenizer, "encode", counted)
    words = [f"#{number}" for number in range(400)]  # each has two spellings
    assert live.complete("a", n=20, max_tokens=1, bad_words=words).status_code == 200
    assert sum("#" in text for text in texts) == 2 * len(words)
    assert all(len(sampling.bad_words or ()) == 2 * len(words) for _, _, sampling in live.engine.requests)


def test_prompts_that_cannot_fit_are_not_encoded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.engine.tokenizer is not None
    monkeypatch.setattr(live.engine.tokenizer, "encode", None)
    text = "x" * (512 * len("<|im_start|>") + 1)
    for response in (live.complete(text), live.complete(["a", text]), live.chat(text)):
        assert "maximum context length is 512 tokens" in message(response, 400)
        assert "6145 characters" in response.text or response.json()["error"]["param"] == "messages"
    assert not live.engine.requests
    monkeypatch.undo()
    assert live.post(TOKENIZE, prompt=text[:-1]).json()["count"] == len(text) - 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TOKENIZE, {"prompt": LONG}),
        (TOKENIZE, {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages/count_tokens", {"model": "toy", "messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses/input_tokens", {"input": LONG}),
    ],
)
def test_texts_that_cannot_fit_are_not_counted(
    live: Live, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.engine.tokenizer, "encode", None)
    response = live.post(path, **body)
    assert response.status_code == 400
    assert "maximum context length is 512 tokens" in response.text


def test_no_list_of_many_tokens_is_made(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold up the event loop, however many threads there are."""
    monkeypatch.setattr("server.generation.model._MANY_TOKENS", 3000)
    for response in (live.post(TOKENIZE, prompt="x" * 3001), live.complete("x" * 3001), live.complete(["x" * 3001])):
        assert message(response, 400).endswith("However, your prompt has 3001 tokens. Please shorten it.")
    assert live.post(TOKENIZE, prompt="x" * 3000).json()["count"] == 3000
    assert live.complete("x" * 5000, truncate_prompt_tokens=-1, max_tokens=1).status_code == 200
    assert not [prompt for _, prompt, _ in live.engine.requests if len(prompt) > 512]


@pytest.mark.parametrize("side", ["left", "right"])
def test_no_more_of_a_truncated_prompt_is_encoded_than_it_can_keep(
    live: Live, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = live.engine.tokenizer
    assert tokenizer is not None
    encode, lengths = tokenizer.encode, list[int]()
    sparse = "<|im_start|>" * 200  # one token
    text = sparse + "ab" * 1000 + "c" * 100_000 + "de" * 1000 + sparse

    def counted(text: str, *args: Any, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, *args, **options)

    whole = encode(text)
    monkeypatch.setattr(tokenizer, "encode", counted)
    for num_tokens in (5, 100, 300):
        lengths.clear()
        assert live.complete(text, truncate_prompt_tokens=num_tokens, truncation_side=side).status_code == 200
        _, prompt, _ = live.engine.requests[-1]
        assert prompt == (whole[-num_tokens:] if side == "left" else whole[:num_tokens])
        assert lengths[0] == 4 * (num_tokens + 64), "most tokens are short"
        assert max(lengths) <= (num_tokens + 64) * len("<|im_start|>")


def test_large_bodies_are_read_in_turns() -> None:
    """Whatever else waits for the event loop comes in between."""

    class Upload:
        headers: dict[str, str] = {}  # noqa: RUF012

        def __init__(self) -> None:
            self.num_left = 10

        async def receive(self) -> dict[str, Any]:
            num_read[-1] += 1
            self.num_left -= 1
            return {"type": "http.request", "body": b"a", "more_body": bool(self.num_left)}

    async def run() -> None:
        arrivals = reading.Arrivals(1000, 60)
        uploads = [asyncio.create_task(arrivals.receive(Upload())) for _ in range(20)]  # type: ignore[arg-type]
        while not all(upload.done() for upload in uploads):
            num_read.append(0)
            await asyncio.sleep(0)

    num_read = [0]
    asyncio.run(run())
    assert sum(num_read) == 200
    assert max(num_read) <= 24, "the first part of each comes with its headers"
    assert sorted(num_read)[-2] <= 4


def test_slow_bodies_of_one_client_refuse_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that holds all memory for bodies, as slowly as it may."""
    monkeypatch.setattr(reading, "_MAX_HELD_BYTES", 4000)

    class Upload:
        headers: dict[str, str] = {}  # noqa: RUF012

        def __init__(self, num_bytes: int, ends: bool = False) -> None:
            self.parts = [{"type": "http.request", "body": b"a" * num_bytes, "more_body": not ends}]

        async def receive(self) -> dict[str, Any]:
            while not self.parts:
                await asyncio.sleep(60)
            return self.parts.pop()

    async def run() -> None:
        arrivals = reading.Arrivals(1000, 60)
        slow = [asyncio.create_task(arrivals.receive(Upload(1000), "address 1/user a")) for _ in range(4)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for tenant in ("address 1/user b", "address 1"):
            with pytest.raises(APIError, match="too many large bodies"):
                await arrivals.receive(Upload(1000, ends=True), tenant)  # type: ignore[arg-type]
        for _ in range(10):
            body = await arrivals.receive(Upload(1000, ends=True), "address 2")  # type: ignore[arg-type]
            arrivals.release(body, "address 2")
        held = [await arrivals.receive(Upload(1000, ends=True), "address 2") for _ in range(2)]  # type: ignore[arg-type]
        with pytest.raises(APIError, match="too many large bodies"):
            await arrivals.receive(Upload(1000, ends=True), "address 2")  # type: ignore[arg-type]
        for upload in slow:
            upload.cancel()
        await asyncio.wait(slow)
        for body in held:
            arrivals.release(body, "address 2")
        assert (arrivals._num_held_bytes, arrivals._held) == (0, {})

    asyncio.run(run())


def test_large_bodies_leave_the_event_loop(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, check_values = [], limits.check_values

    def seen(decoded: object) -> None:
        threads.append(threading.current_thread().name)
        check_values(decoded)

    monkeypatch.setattr("server.http.reading.check_values", seen)
    assert live.chat("Hi").status_code == 200
    assert live.post(CHAT, messages=MESSAGES * 100).status_code == 400
    assert live.complete("Hi", metadata="x" * 20_000).status_code == 200
    assert not threads[0].startswith("worker")
    assert threads[1].startswith("worker")
    assert threads[2].startswith("worker")


def test_memory_of_large_bodies_goes_back_to_the_system(
    serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, trimmed = serve(FakeEngine()), threading.Event()
    monkeypatch.setattr("server.generation.workers._TRIM_SECONDS", 0)
    monkeypatch.setattr("engine.utils.memory._trim", lambda keep: trimmed.set())
    assert live.complete("Hi").status_code == 200
    assert not trimmed.is_set()
    wait_until(lambda: live.complete("Hi", metadata="x" * 20_000).is_success and trimmed.is_set())


def test_bad_words_of_too_many_tokens(live: Live) -> None:
    words = [f"{number:04}" for number in range(500)]
    assert live.complete("a", bad_words=words[:400], max_tokens=1).status_code == 200
    text = message(live.complete("a", bad_words=words), 400)
    assert text == "bad_words must be fewer or shorter: 1000 spellings of up to 5 tokens, whose product is above 4096"


def test_work_for_a_client_that_has_gone_is_dropped(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests keep all threads busy; the next one waits for a thread, and its client hangs up."""
    busy, go_on, seen = threading.Semaphore(0), threading.Event(), list[str]()
    read = limits.check_values

    def slow(decoded: Any) -> None:
        seen.append(decoded["prompt"])
        if decoded["prompt"] != "small":
            busy.release()
            assert go_on.wait(60)
        read(decoded)

    monkeypatch.setattr("server.http.reading.check_values", slow)
    large = "x" * 20_000
    busy_client = partial(live.complete, "busy", user=large)
    clients = [threading.Thread(target=busy_client) for _ in range(NUM_THREADS)]
    for client in clients:
        client.start()
    for _ in clients:
        assert busy.acquire(timeout=60)
    with pytest.raises(httpx.ReadTimeout):
        live.http.post(COMPLETIONS, json={"prompt": "gone", "user": large}, timeout=httpx.Timeout(60, read=0.2))
    while 'handler="/v1/completions",method="POST",status="4xx"' not in live.http.get("/metrics").text:
        assert live.complete("small").status_code == 200
    go_on.set()
    for client in clients:
        client.join()
    assert seen.count("busy") == NUM_THREADS
    assert "gone" not in seen


class PanicException(BaseException):
    """Panic as libraries written in Rust raise it."""


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE, "/v1/messages"])
def test_a_panicking_library_is_a_json_error(live: Live, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def panicking(*args: Any, **options: Any) -> list[int]:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(live.engine.tokenizer, "encode", panicking)
    field: dict[str, Any] = {"prompt": "a"} if path in (COMPLETIONS, TOKENIZE) else {"messages": MESSAGES}
    if path == "/v1/messages":
        field |= {"max_tokens": 5, "model": "toy"}
    response = live.post(path, **field)
    assert response.status_code == 500
    assert "log" in response.json()["error"]["message"]
    monkeypatch.undo()
    assert live.post(path, **field).status_code == 200
