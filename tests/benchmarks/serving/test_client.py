"""The benchmark's client: whatever the shape of a stream, its events are seen; whatever goes wrong has a name."""

import asyncio
import itertools
import socket
from typing import Any

import pytest

from benchmarks.serving.client import Answer, Client, Failure
from engine.errors import ConfigError
from tests.support.stub_sse import Stub

COMPLETION = {"model": "m", "prompt": [1, 2], "max_tokens": 6}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 6}


def ask(
    url: str, body: dict[str, Any], *, path: str = "/v1/completions", count: int = 1, **options: Any
) -> list[Answer]:
    """One request after the other with one client."""

    async def run() -> list[Answer]:
        client = Client(url, **options)
        request = client.request("POST", path, body)
        answers = [await client.stream(request, 2) for _ in range(count)]
        await client.close()
        return answers

    return asyncio.run(run())


@pytest.mark.parametrize("behaviour", ["ok", "crlf", "lump", "dribble", "until-closed", "one-shot", "usage-always"])
@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_every_token_event_has_a_time(stub: Stub, behaviour: str, body: dict[str, Any]) -> None:
    (answer,) = ask(stub.url(behaviour), body, keep_events=True)
    assert answer.ok, answer.error
    assert len(answer.times) == answer.output_len == 6
    assert answer.prompt_len == 7
    assert answer.num_cached == 5
    assert answer.text == " 0 1 2 3 4 5"
    assert answer.start < answer.times[0]
    assert all(before <= after for before, after in itertools.pairwise(answer.times))
    assert answer.ttft + sum(answer.itl) == pytest.approx(answer.latency)


def test_a_connection_is_used_again(stub: Stub) -> None:
    assert all(answer.ok for answer in ask(stub.url("ok"), COMPLETION, count=5))
    assert stub.num_connections == 1


def test_a_connection_that_the_server_has_closed_is_not_an_error(stub: Stub) -> None:
    assert all(answer.ok for answer in ask(stub.url("one-shot"), COMPLETION, count=5))
    assert stub.num_connections == 5


def test_requests_at_the_same_time_have_connections_of_their_own(stub: Stub) -> None:
    async def run() -> list[Answer]:
        client = Client(stub.url("ok"))
        request = client.request("POST", "/v1/completions", COMPLETION)
        answers = await asyncio.gather(*[client.stream(request) for _ in range(50)])
        await client.close()
        return answers

    answers = asyncio.run(run())
    assert [len(answer.times) for answer in answers if answer.ok] == [6] * 50
    assert stub.num_connections == 50


def test_headers_are_sent(stub: Stub) -> None:
    ask(stub.url("ok"), COMPLETION, headers={"Authorization": "Bearer key"})
    assert "Authorization: Bearer key\r\n" in stub.headers[0]
    assert f"Host: 127.0.0.1:{stub.port}\r\n" in stub.headers[0]


@pytest.mark.parametrize(
    ("behaviour", "cause", "details"),
    [
        ("unauthorized", "HTTP 401", "wrong key"),
        ("overloaded", "HTTP 503", "<html>try later</html>"),
        ("not-streaming", "not an event stream", "all at once"),
        ("error-midway", "error in the stream", "out of memory"),
        ("closed-midway", "connection lost", "closed by the server"),
        ("no-done", "stream ended early", "after 6 events, without [DONE]"),
        ("no-tokens", "no tokens", ""),
        ("nonsense", "not understood", "{]"),
        ("not-http", "not an HTTP response", ""),
        ("hanging", "timeout", "no whole answer after 0.3 s"),
    ],
)
def test_every_failure_has_its_cause(stub: Stub, behaviour: str, cause: str, details: str) -> None:
    failed, again = ask(stub.url(behaviour), COMPLETION, count=2, timeout=0.3 if behaviour == "hanging" else 60)
    assert failed.cause == again.cause == cause
    assert failed.error.startswith(cause)
    assert details in failed.error
    assert not failed.ok


def test_nobody_is_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        (answer,) = ask(f"http://127.0.0.1:{port}", COMPLETION)
    assert answer.error == f"connection refused: 127.0.0.1:{port}"
    (answer,) = ask("http://nowhere.invalid:8000", COMPLETION)
    assert answer.cause == "host not found"


def test_no_tls(stub: Stub) -> None:
    (answer,) = ask(stub.url("ok").replace("http:", "https:"), COMPLETION, timeout=0.3)
    assert answer.cause in ("TLS", "timeout")


def test_json(stub: Stub) -> None:
    async def get(behaviour: str) -> Any:
        client = Client(stub.url(behaviour))
        try:
            return await client.json("GET", "/v1/models")
        finally:
            await client.close()

    assert asyncio.run(get("ok"))["data"][0]["id"] == "stub-model"
    with pytest.raises(Failure, match="HTTP 404"):
        asyncio.run(get("unlisted"))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a:b", "http://a:99999"])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url must be like http://"):
        Client(url)
