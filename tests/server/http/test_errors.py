"""Bad input, a dead engine, full queues, keys: each answered with the right status and one clear message."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine.errors import ConfigError
from server import listening
from server.apis.openai.chat.protocol import NOT_YET_IN_CHAT
from server.apis.openai.completions.protocol import NOT_YET_IN_COMPLETIONS
from server.apis.openai.fields import NOT_YET_IN_BOTH
from server.app import create_app
from server.http.errors import unexpected
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
JSON = {"Content-Type": "application/json"}


def check(response: httpx.Response, status: int, param: str | None, *words: str) -> str:
    """The response is an error of this kind; its message holds all `words`."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["code"], error["param"]) == (status, param), error
    kinds = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}
    assert error["type"] == kinds.get(status, error["type"])
    for word in words:
        assert word in error["message"], error["message"]
    assert "\n" not in error["message"]
    return error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_kinds_of_json_are_read_alike(live: Live, path: str) -> None:
    def ask(kind: str, content: bytes) -> tuple[int, Any]:
        response = live.http.post(path, content=content, headers={"Content-Type": kind})
        answer = response.json()
        return response.status_code, answer["choices"] if response.is_success else answer

    field = b'"messages": [{"role": "user", "content": "Hi"}]' if path == CHAT else b'"prompt": "Hi"'
    good = b'{"max_tokens": 5, "colour": 1, ' + field + b"}"
    wrong = (b"", b"[]", b"null", b"{", b"\xff", b'{"max_tokens": NaN, ' + field + b"}", good.replace(b"5", b'"5"'))
    for content, status in ((good, 200), (b"\xef\xbb\xbf" + good, 200), *((each, 400) for each in wrong)):
        answers = [ask(kind, content) for kind in ("application/json", "application/json; charset=utf-8")]
        assert answers[0] == answers[1]
        assert answers[0][0] == status, answers[0]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "hot", ["valid number", "'hot'"]),
        ("temperature", True, ["number"]),
        ("temperature", -0.1, ["[0, 2]", "-0.1"]),
        ("temperature", 2.1, ["[0, 2]"]),
        ("top_p", -0.1, ["[0, 1]"]),
        ("top_p", 1.5, ["[0, 1]", "1.5"]),
        ("top_k", -2, ["-2"]),
        ("top_k", 1.5, ["integer"]),
        ("min_p", 2, ["[0, 1]"]),
        ("n", 0, ["1 to 128"]),
        ("n", 10**6, ["1 to 128"]),
        ("n", "2", ["integer"]),
        ("seed", 2**64, ["64-bit"]),
        ("seed", 0.5, ["integer"]),
        ("max_tokens", 0, ["at least 1"]),
        ("max_tokens", -5, ["at least 1", "-5"]),
        ("max_tokens", "many", ["integer"]),
        ("min_tokens", -1, ["at least 0"]),
        ("min_tokens", 600, ["at most max_tokens"]),
        ("stop", 5, ["string"]),
        ("stop", [1], ["string"]),
        ("stop", ["a"] * 65, ["at most 64"]),
        ("stop", "a" * 1001, ["1000 characters"]),
        ("stop_token_ids", [-1], ["token ids"]),
        ("stop_token_ids", [259], ["below 259"]),
        ("stop_token_ids", ["a"], ["integer"]),
        ("stream", "yes", ["boolean"]),
        ("stream_options", {"include_usage": True}, ["stream=true"]),
        ("ignore_eos", 1, ["boolean"]),
        ("presence_penalty", 2.5, ["[-2, 2]"]),
        ("frequency_penalty", "high", ["number"]),
        ("repetition_penalty", 0, ["[0.01, 100]"]),
        ("logit_bias", {"5": 1000}, ["[-100, 100]"]),
        ("logit_bias", {"five": 1}, ["integers", "'five'"]),
        ("logit_bias", {"259": 1}, ["below 259"]),
        ("logit_bias", [5], ["object"]),
        ("bad_words", [""], ["texts"]),
        ("allowed_token_ids", [], ["at least one"]),
        ("typical_p", 0, ["(0, 1]"]),
        ("dry_sequence_breakers", [""], ["texts"]),
        ("xtc_probability", 2, ["[0, 1]"]),
        ("prompt_logprobs", 6, ["max_logprobs=5"]),
        ("prompt_logprobs", -2, ["-1 or in [0, 20]"]),
        ("truncate_prompt_tokens", -2, ["-1"]),
        ("cache_salt", "", ["at least 1"]),
        ("priority", 2**31, ["2147483647"]),
        ("logits_processors", ["x"], ["not supported yet", "[]"]),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_out_of_range(live: Live, path: str, field: str, value: Any, words: list[str]) -> None:
    body: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    message = check(
        live.post(path, **body, **{field: value}), 400, "stop_token_ids[0]" if value == ["a"] else field, *words
    )
    assert message.startswith(field)
    assert not live.engine.requests


def test_every_field_that_is_not_supported_is_refused_on_its_own(live: Live) -> None:
    for path, body, tables in (
        (CHAT, {"messages": MESSAGES}, (NOT_YET_IN_BOTH, NOT_YET_IN_CHAT)),
        (COMPLETIONS, {"prompt": "Hi"}, (NOT_YET_IN_BOTH, NOT_YET_IN_COMPLETIONS)),
    ):
        for name, neutral in (pair for table in tables for pair in table.items()):
            check(live.post(path, **body, **{name: "something"}), 400, name, "not supported yet")
            for value in (*neutral, None):
                assert live.post(path, max_tokens=1, **body, **{name: value}).status_code == 200, name


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", ["required"]),
        ({"messages": []}, "messages", ["must not be empty"]),
        ({"messages": "Hi"}, "messages", ["list"]),
        ({"messages": ["Hi"]}, "messages[0]", ["object"]),
        ({"messages": [{"role": "user"}]}, "messages[0].content", ["required"]),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", ["required"]),
        ({"messages": [{"role": "<robot>", "content": "Hi"}]}, "messages[0].role", ["'<robot>'"]),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ["text"]),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
                ]
            },
            "messages",
            ["reads text only"],
        ),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", ["no such words"]),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function", ["required"]),
        ({"messages": MESSAGES, "tools": [{"type": "web_search"}]}, "tools[0].type", ["'function'"]),
        ({"messages": MESSAGES, "tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name", ["a b"]),
        ({"messages": MESSAGES, "tools": [TOOL, TOOL]}, "tools[1].function.name", ["two tools", "'f'"]),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", ["requires tools"]),
        ({"messages": MESSAGES, "tool_choice": "perhaps"}, "tool_choice", ['"auto", "required"']),
        ({"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice", ["'g'"]),
        ({"messages": MESSAGES, "reasoning_effort": "huge"}, "reasoning_effort", ["'none'", "'huge'"]),
        ({"messages": MESSAGES, "request_id": "a b"}, "request_id", ["pattern"]),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", ["logprobs=true"]),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", ["[0, 20]"]),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 6}, "top_logprobs", ["max_logprobs=5"]),
        ({"messages": MESSAGES, "logprobs": 2}, "logprobs", ["boolean"]),
        ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens", ["at least 1"]),
        (
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            ["add_generation_prompt"],
        ),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ["messages"]),
        ({"messages": MESSAGES, "model": "gpt"}, "model", []),
    ],
)
def test_chat_requests(live: Live, body: dict[str, Any], param: str | None, words: list[str]) -> None:
    if body.get("model"):
        check(live.post(CHAT, **body), 404, "model", "The model `gpt` does not exist", "toy")
    else:
        check(live.post(CHAT, **body), 400, param, *words)
    assert not live.engine.requests


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, ["required"]),
        ({"prompt": ""}, ["empty"]),
        ({"prompt": []}, ["empty"]),
        ({"prompt": ["a", ""]}, ["empty"]),
        ({"prompt": [[]]}, ["empty"]),
        ({"prompt": None}, ["string"]),
        ({"prompt": {"text": "a"}}, ["string"]),
        ({"prompt": [1, "a"]}, ["string"]),
        ({"prompt": [1.5]}, ["string"]),
        ({"prompt": [True]}, ["string"]),
        ({"prompt": [259]}, ["0 to 258", "259"]),
        ({"prompt": [-1]}, ["0 to 258", "-1"]),
        ({"prompt": [10**30]}, ["0 to 258"]),
    ],
)
def test_completion_prompts(live: Live, body: dict[str, Any], words: list[str]) -> None:
    check(live.post(COMPLETIONS, **body), 400, "prompt", *words)
    assert not live.engine.requests


def test_completion_logprobs_limits(live: Live) -> None:
    check(live.complete(logprobs=21), 400, "logprobs", "[0, 20]")
    check(live.complete(logprobs=6), 400, "logprobs", "max_logprobs=5")
    check(live.complete(logprobs=True), 400, "logprobs", "integer")
    check(live.complete(echo=True, logprobs=1, n=2, stream=True), 400, "echo", "n above 1")
    check(live.complete(prompt_logprobs=1, stream=True), 400, "prompt_logprobs", "stream=true")
    check(live.complete(max_tokens=0), 400, "max_tokens", "at least 1")
    check(live.complete(model="other"), 404, "model", "`other`")


def test_prompts_that_are_too_long(live: Live) -> None:
    message = check(live.complete("x" * 600), 400, "prompt", "512", "600", "maximum context length is 512 tokens")
    check(live.complete("x" * 512), 400, "prompt", "512 tokens")
    assert live.complete("x" * 511).json()["usage"]["completion_tokens"] == 1
    check(live.complete(["a", "x" * 600]), 400, "prompt", "512", "600")
    check(live.chat("x" * 600), 400, "messages", "512 tokens", str(600 + len("_user\n_\n_assistant\n")))
    check(live.chat("x" * 600, stream=True), 400, "messages", "512")
    assert "shorten" in message


@pytest.mark.parametrize(
    ("content", "headers", "words"),
    [
        (b'{"prompt"', JSON, "not valid JSON"),
        (b"", JSON, "empty"),
        (b"null", JSON, "JSON object"),
        (b"[1]", JSON, "JSON object"),
        (b'"text"', JSON, "JSON object"),
        (b"\xff\xfe", JSON, "JSON"),
        (b"[" * 100_000, JSON, "nested too deeply"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", JSON, "out of range"),
        (b'{"prompt": "a", "temperature": 1e999}', JSON, "out of range"),
        (b'{"prompt": "a", "temperature": NaN}', JSON, "invalid character (byte 31)"),
        (b'{"prompt": "a\xff"}', JSON, "UTF-8 (invalid start byte at byte 13)"),
        (b'{"prompt": "\\ud800", "user": "\xc3\xa9\xc3"}', JSON, "UTF-8 (invalid continuation byte at byte 32)"),
        (b'{"prompt": "a\\ud800', JSON, "truncated"),
        (b'{"prompt": "a"}', {}, "application/json"),
        (b'{"prompt": "a"}', {"Content-Type": "text/plain"}, "application/json"),
        (b"prompt=a", {"Content-Type": "application/x-www-form-urlencoded"}, "application/json"),
    ],
)
def test_bodies_that_are_not_json(live: Live, content: bytes, headers: dict[str, str], words: str) -> None:
    for path in (CHAT, COMPLETIONS):
        check(live.http.post(path, content=content, headers=headers), 400, None, words)


def test_bodies_that_are_json_after_all(live: Live) -> None:
    for content in (
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": 1, "prompt": "a"}',
        b'{"prompt": "\\ud83d\\ude00\\u0000"}',
    ):
        assert live.http.post(COMPLETIONS, content=content, headers=JSON).status_code == 200


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (rb"a\ud83d", "a\ufffd"),
        (rb"\udc00b", "\ufffdb"),
        (rb"\ud83d\ud83d\ude00\ud83d", "\ufffd\N{GRINNING FACE}\ufffd"),
        (rb"\\ud83d \\\ud83d", "\\ud83d \\\ufffd"),
        (b"a\xed\xa0\xbd", "a\ufffd"),
    ],
)
def test_lone_surrogates_are_replaced(live: Live, text: bytes, read: str) -> None:
    """Clients that count in UTF-16 cut characters in halves, and send the conversation again and again."""
    body = b'{"max_tokens": 2, "messages": [{"role": "user", "content": "' + text + b'"}]}'
    response = live.http.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 200
    assert "U+FFFD" in response.json()["warnings"][0]
    assert live.engine.tokenizer is not None
    prompt = live.engine.tokenizer.decode(live.engine.requests[-1][1], skip_special_tokens=False)
    assert prompt.startswith(f"<|im_start|>user\n{read}<|im_end|>")
    unknown = b'{"max_tokens": 2, "prompt": "a", "' + text + b'": 1}'
    assert live.http.post(COMPLETIONS, content=unknown, headers=JSON).status_code == 200


def test_paths_and_methods(live: Live) -> None:
    check(live.http.get("/v2/nothing"), 404, None, "/v2/nothing")
    response = live.http.get(CHAT)
    check(response, 405, None, "GET")
    assert response.headers["allow"] == "POST"
    check(live.http.get("/v1/models/other/name"), 404, "model", "`other/name`")


def test_no_chat_template(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(template=None))
    check(live.chat(), 400, None, "no chat template", "/v1/completions", "--chat-template")
    assert live.complete().status_code == 200
    live = serve(FakeEngine(template="{% broken"))
    check(live.chat(), 400, None, "does not work", "line 1", "--chat-template")
    with pytest.raises(ConfigError, match=r"chat_template: line 1"):
        create_app(FakeEngine(), ServerConfig(chat_template="{% broken"))
    with pytest.raises(ConfigError, match="must be a file or a template"):
        ServerConfig(chat_template="/no/such/file")
    with pytest.raises(ConfigError, match="must not contain tools"):
        create_app(FakeEngine(), ServerConfig(default_chat_template_kwargs={"tools": 1}))


def test_no_tokenizer(serve: Callable[..., Live]) -> None:
    engine = FakeEngine()
    engine.tokenizer = None
    live = serve(engine)
    check(live.complete("text"), 400, None, "no tokenizer", "token ids")
    check(live.chat(), 400, None, "no chat template")
    check(live.complete([1, 2], stop="x"), 400, "stop", "tokenizer")
    assert live.complete([1, 2]).json()["choices"][0]["text"] == ""


def test_dead_engine(live: Live) -> None:
    live.engine.die_after = 3
    check(live.chat(), 500, None, "SIGKILL")
    for method, path in (("GET", "/health"), ("HEAD", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert live.http.request(method, path).status_code == 503
    assert live.http.get("/health").content == b""
    check(live.chat(), 503, None, "not running")
    check(live.chat(stream=True), 503, None, "not running")
    check(live.complete(), 503, None, "not running")
    live.engine.states.enter("ready")
    response = live.http.get("/health")
    assert (response.status_code, response.content) == (200, b"")


def test_failing_request(live: Live) -> None:
    live.engine.fail_after = 3
    check(live.chat(), 500, None, "engine failed", "it is broken")
    check(live.complete(n=3), 500, None, "engine failed", "it is broken")


def test_a_request_that_turns_out_to_ask_too_much(live: Live) -> None:
    live.engine.fail_after, live.engine.refuses = 3, True
    check(live.chat(), 400, None, "the answer cannot be completed", "it is broken")
    check(live.complete(n=3), 400, None, "the answer cannot be completed", "it is broken")


def test_own_mistakes_say_nothing_of_the_inside(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise KeyError("secret path")

    monkeypatch.setattr(live.engine, "generate", broken)
    message = check(live.chat(), 500, None, "log")
    assert "secret" not in message


def test_an_idle_server_takes_as_many_as_run_and_wait(serve: Callable[..., Live]) -> None:
    """All of a burst, before the engine has said anything of the first request; and no more."""
    live = serve(FakeEngine(max_num_seqs=8), ServerConfig(max_num_queued_reqs=4))
    live.engine.holds = True
    with ThreadPoolExecutor(12) as threads:
        burst = [threads.submit(live.post, "/v1/embeddings", input=str(i)) for i in range(12)]
        wait_until(lambda: len(live.engine.in_flight) == 12)
        refused = live.chat()
        check(refused, 503, None, "4 requests are waiting", "at most 4", "try again in 5 seconds")
        assert refused.headers["retry-after"] == "5"
        assert live.post("/v1/messages", max_tokens=1, model="toy", messages=MESSAGES).headers["retry-after"] == "5"
        live.engine.holds = False
        assert [each.result().status_code for each in burst] == [200] * 12
    assert live.complete(n=12, max_tokens=1).status_code == 200
    check(live.complete(n=13), 400, None, "asks for 13 answers", "at most 12")
    assert 'vllm:admission_rejections_total{model_name="toy",reason="queue_full"} 2.0' in live.http.get("/metrics").text


def test_other_origins(live: Live, serve: Callable[..., Live]) -> None:
    origin = {"Origin": "https://example.org"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert "access-control-allow-origin" not in live.http.get("/v1/models", headers=origin).headers
    opened = serve(FakeEngine(), ServerConfig(allowed_origins=('["https://example.org"]',), api_key=("k",)))
    response = opened.http.options(CHAT, headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://example.org"
    denied = opened.http.get("/v1/models", headers=origin)
    assert denied.status_code == 401
    assert denied.headers["access-control-allow-origin"] == "https://example.org", "a page may read that it has no key"


def test_request_ids(live: Live, serve: Callable[..., Live]) -> None:
    assert live.http.get("/health", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert len(live.http.get("/health").headers["x-request-id"]) == 32
    for forged in ("a" * 129, "two words", "caf\xe9"):
        answer = live.http.get("/health", headers={b"X-Request-Id": forged.encode("latin-1")})
        assert len(answer.headers["x-request-id"]) == 32, forged
    silent = serve(FakeEngine(), ServerConfig(enable_request_id_headers=False))
    assert "x-request-id" not in silent.http.get("/health").headers


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 70000}, "port must be"),
        ({"ssl_certfile": "/no/such"}, "ssl_certfile must be a file"),
        ({"allowed_origins": ("[1",)}, "allowed_origins must be a list"),
        ({"sse_keep_alive_interval": -1}, "sse_keep_alive_interval"),
        ({"uvicorn_log_level": "loud"}, "uvicorn_log_level must be one of"),
    ],
)
def test_settings_out_of_range(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**values)


def test_logs_do_not_show_what_clients_sent(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("a secret")

    with pytest.raises(ValueError, match="secret") as caught:
        fails()
    with caplog.at_level(logging.INFO):
        assert unexpected(caught.value).status == 500
    exc_info = (ValueError, caught.value, caught.tb)
    record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 1, "Exception", (), exc_info)
    assert listening.without_text(record)
    for text in (caplog.text, logging.Formatter().format(record)):
        assert "ValueError" in text
        assert "in fails" in text
        assert "secret" not in text.replace('raise ValueError("a secret")', ""), "but for its source"
