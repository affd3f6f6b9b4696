"""Log lines: text or JSON, with what they are about."""

import json
import logging
from collections.abc import Iterator

import pytest

from engine.errors import ConfigError
from engine.utils.log import configure_logging
from server.observability.context import CURRENT, new_context
from server.observability.logs import RequestFields
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import run_server

Log = pytest.CaptureFixture[str]


@pytest.fixture
def log(capsys: Log) -> Iterator[Log]:
    """Text written to stderr."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    token = CURRENT.set(None)
    yield capsys
    CURRENT.reset(token)
    root.handlers = handlers
    root.setLevel(level)


def configure(*filters: logging.Filter) -> None:
    """Configure logging as a program does that pytest has not given handlers."""
    logging.getLogger().handlers = []
    configure_logging(*filters)


def access_line(path: str = "/v1/completions?key=secret", method: str = "POST", status: int = 200) -> None:
    arguments = ("127.0.0.1:5000", method, path, "1.1", status)
    logging.getLogger("uvicorn.access").warning('%s - "%s %s HTTP/%s" %d', *arguments)


def test_json_lines_say_which_request_they_are_about(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "json")
    configure(RequestFields())
    logging.getLogger("server").warning('two\nlines and "quotes"')
    CURRENT.set(new_context({"type": "http", "headers": [(b"x-request-id", b"mine")]}))
    access_line()
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("server").exception("it failed")
    plain, access, failed = map(json.loads, log.readouterr().err.splitlines())
    assert plain["message"] == 'two\nlines and "quotes"'
    assert plain["level"] == "warning"
    assert plain["time"].endswith("Z")
    assert "request_id" not in plain
    assert access["request_id"] == failed["request_id"] == "mine"
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/completions", 200)
    assert failed["exception"].endswith("ValueError: broken")


def test_lines_of_text_end_with_the_request(log: Log) -> None:
    configure(RequestFields(["/", "/metrics", "/static/"]))
    access_line("/")
    access_line("/metrics?name=any")
    access_line("/static/js/page.js")
    logging.getLogger("server").warning("no request")
    CURRENT.set(new_context({"type": "http", "headers": [(b"x-request-id", b"mine")]}))
    access_line()
    first, second = log.readouterr().err.splitlines()
    assert first.endswith("no request")
    assert second.endswith('"POST /v1/completions HTTP/1.1" 200 request_id=mine')


def test_polls_while_the_server_starts_take_one_line(log: Log) -> None:
    configure(RequestFields())
    for status in (503, 503, 503, 200, 200, 503):
        access_line("/readyz?any", "GET", status)
    access_line("/health", "GET", 503)
    for _ in range(2):
        access_line("/v1/completions", "POST", 503)
    shown = [line.partition('"')[2].split() for line in log.readouterr().err.splitlines()]
    assert [(words[1], words[3]) for words in shown] == [
        *(("/readyz", status) for status in ("503", "200", "200", "503")),
        ("/health", "503"),
        *(("/v1/completions", "503"),) * 2,
    ]


def test_logging_is_configured_anew_but_other_handlers_stay(log: Log) -> None:
    configure()
    configure_logging(RequestFields())
    assert len(logging.getLogger().handlers) == 1
    theirs = logging.NullHandler()
    logging.getLogger().handlers = [theirs]
    configure_logging()
    assert logging.getLogger().handlers == [theirs]


def test_an_unknown_format_is_named(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="QUIRE_LOG_FORMAT must be one of text, json, got 'xml'"):
        configure_logging()


def test_a_failure_of_the_server_itself_has_the_request_s_id(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: object) -> None:
        raise RuntimeError("broken")

    engine = FakeEngine()
    monkeypatch.setattr(engine, "generate", fail)
    fields = RequestFields()
    caplog.handler.addFilter(fields)
    try:
        with run_server(engine) as live:
            answer = live.http.post("/v1/completions", json={"prompt": "Hi"}, headers={"X-Request-Id": "mine"})
    finally:
        caplog.handler.removeFilter(fields)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.__dict__["fields"]["request_id"] == "mine"
