"""`quire check`: what it says of Quire, of servers that do wrong, and of those that do less."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from server.cli import main as cli
from server.cli.checks import openai_api
from server.cli.checks.runner import Server, run
from server.settings import ServerConfig
from tests.support.fake_engine import GrammarEngine
from tests.support.live_server import Live, run_server
from tests.support.templates import HERMES


@pytest.fixture(scope="module")
def quire() -> Iterator[Live]:
    engine = GrammarEngine(template=HERMES, max_model_len=2048)
    with run_server(engine, ServerConfig(api_key=("sesame",))) as live:
        yield live


def test_quire_passes(quire: Live, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{quire.port}/v1"
    assert cli.main(["check", url, "--api-key", "sesame", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["url"], body["model"]) == (url.removesuffix("/v1"), "toy")
    outcomes = {(row["group"], row["check"]): row["outcome"] for row in body["results"]}
    assert len(outcomes) == len(body["results"]) > 40
    assert "fails" not in outcomes.values()
    assert outcomes["openai client", "chat, whole and streamed"] == "ok"
    assert outcomes["anthropic client", "messages, whole and streamed"] == "ok"
    assert outcomes["ollama client", "chat, whole and streamed"] == "ok"
    assert {outcome for (group, _), outcome in outcomes.items() if group == "Ollama"} == {"ok"}
    assert all(row["note"] for row in body["results"] if row["outcome"] != "ok")


def test_the_table(quire: Live, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{quire.port}"
    assert cli.main(["check", url, "--api-key", "sesame", "--only", "service", "streams"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{url} · toy"
    assert lines[2] == "service"
    assert "  ✓ GET /v1/models" in lines[3]
    assert lines[-1] == "8 work, 0 fail, 0 not offered"


class Odd(BaseHTTPRequestHandler):
    """A server of its own ways."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, "application/json", json.dumps({"data": [{"id": "odd", "object": "model"}]}))
        else:
            self._send(404, "text/plain", "no")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("stream"):
            self._send(200, "text/event-stream", self.server.events)  # type: ignore[attr-defined]
        elif self.path == "/v1/chat/completions":
            message = {"role": "assistant", "content": "always the same"}
            usage = {"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            self._send(
                200, "application/json", json.dumps({"object": "chat.completion", "choices": choices, "usage": usage})
            )
        else:
            self._send(404, "application/json", '{"error": {"message": "what?"}}')

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def odd() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    server.events = "data: {}\n\n"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_that_does_wrong(odd: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{odd.server_port}"
    groups = ["service", "chat", "streams", "completions", "errors", "embeddings"]
    assert cli.main(["check", url, "--json", "--only", *groups]) == 1
    rows = {(row["group"], row["check"]): row for row in json.loads(capsys.readouterr().out)["results"]}

    def result(group: str, check: str) -> tuple[str, str]:
        row = rows[group, check]
        return row["outcome"], row["note"]

    assert result("chat", "an answer") == ("ok", "")
    assert result("chat", "max_tokens") == ("fails", "max_tokens=2 gave 9 tokens")
    assert result("chat", "several answers (n)") == ("fails", "n=3 did not give choices 0, 1 and 2")
    assert result("chat", "stop") == ("fails", "the stop text is in the answer")
    assert result("streams", "chat") == ("fails", "the stream does not end with [DONE]")
    assert result("completions", "an answer") == ("absent", "status 404: what?")
    assert result("embeddings", "POST /v1/embeddings") == ("absent", "status 404: what?")
    assert result("errors", "an unknown model is 404") == ("fails", "status 200 instead of 404")
    assert result("service", "GET /health") == ("absent", "status 404")


@pytest.mark.parametrize(
    ("events", "note"),
    [
        ("data: {}", "the last event does not end with an empty line"),
        ("hello\n\n", "no line of an event: 'hello'"),
        ('data: {"id": "1", "choices": []}\n\ndata: {"id": "2"}\n\ndata: [DONE]\n\n', "the chunks have different ids"),
        ('data: {"error": {}}\n\ndata: [DONE]\n\n', "there is an error in the stream"),
        ("data: {]\n\ndata: [DONE]\n\n", "JSONDecodeError"),
    ],
)
def test_streams_that_are_wrong(odd: ThreadingHTTPServer, events: str, note: str) -> None:
    odd.events = events  # type: ignore[attr-defined]
    server = Server(f"http://127.0.0.1:{odd.server_port}", api_key=None, model="odd", timeout=60)
    (check,) = [each for each in openai_api.suite.checks if (each.group, each.name) == ("streams", "chat")]
    result = run(check, server)
    server.http.close()
    assert (result.outcome, result.is_bad) == ("fails", True)
    assert result.note.startswith(note)


def test_no_server(quire: Live, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        ([f"http://127.0.0.1:{quire.port}"], "requires an API key: --api-key KEY"),
        (["localhost:8000"], "URL must begin with http"),
        (["http://x", "--only", "nothing"], "only must be some of service, chat"),
    ):
        assert cli.main(["check", *words]) == 1
        assert message in capsys.readouterr().err


def test_names_are_unique() -> None:
    names = [(check.group, check.name) for check in openai_api.suite.checks]
    assert len(names) == len(set(names))
