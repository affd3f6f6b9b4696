"""Parameters that are ignored are named: in the answer, in a header, and with --strict by refusing."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live

HEADER = "x-quire-warnings"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body", "params"),
    [
        (CHAT, {"messages": MESSAGES, "colour": "red"}, ["colour"]),
        (CHAT, {"messages": [{**MESSAGES[0], "mood": 1}]}, ["messages[0].mood"]),
        (
            CHAT,
            {
                "messages": [
                    *MESSAGES,
                    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
                ]
            },
            ["messages[1].content[0].cache_control"],
        ),
        (CHAT, {"messages": MESSAGES, "store": True}, ["store"]),
        (COMPLETIONS, {"prompt": "Hi", "prediction": {"type": "content"}}, ["prediction"]),
        (CHAT, {"messages": MESSAGES, "service_tier": "flex", "a": 1, "b": 2}, ["a", "b", "service_tier"]),
        (COMPLETIONS, {"prompt": "Hi", "suffixes": []}, ["suffixes"]),
    ],
)
def test_warnings(live: Live, path: str, body: dict[str, Any], params: list[str]) -> None:
    response = live.post(path, **body)
    assert response.status_code == 200
    warnings = response.json()["warnings"]
    assert json.loads(response.headers[HEADER]) == warnings
    assert sorted(warning.partition(":")[0] for warning in warnings) == sorted(params)
    response = live.post(path, **body, stream=True)
    assert json.loads(response.headers[HEADER]) == warnings
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert chunks[0]["warnings"] == warnings
    assert not any("warnings" in chunk for chunk in chunks[1:])


def test_no_warnings(live: Live) -> None:
    body: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
    }
    for response in (live.chat(**body), live.complete(**body), live.chat(store=None, prediction=None)):
        assert response.status_code == 200
        assert "warnings" not in response.json()
        assert HEADER not in response.headers


def test_strict(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), ServerConfig(strict=True))
    for body, param in (
        ({"colour": "red"}, "colour"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ):
        error = live.chat(**body).json()["error"]  # type: ignore[arg-type]
        assert (error["code"], error["param"]) == (400, param)
        assert error["message"].startswith(param + ": ")
    assert live.complete(colour="red").json()["error"]["param"] == "colour"
    assert live.chat(user="me", store=False).status_code == 200


def test_hostile_names(live: Live) -> None:
    names: dict[str, Any] = {f"{number}\r\nSet-Cookie: a=b ü" + "x" * 10_000: 1 for number in range(100)}
    response = live.chat(**names)
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    assert len(response.json()["warnings"]) == 20
    assert len(response.headers[HEADER]) <= 1000, "proxies take a few KB of headers"
    *shown, last = json.loads(response.headers[HEADER])
    assert shown == response.json()["warnings"][: len(shown)]
    assert "`warnings`" in last
