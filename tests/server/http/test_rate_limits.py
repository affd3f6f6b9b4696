"""Limits of each key: refusals, what is left, and that one key's use is not another's."""

from collections.abc import Callable
from pathlib import Path

import pytest

from server.generation import rate_limits
from server.http.rate_limits import _duration
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live

KEYS = "few: {key: few-key, requests_per_minute: 3}\nshort: {key: short-key, tokens_per_minute: 10}\nfree: free-key\n"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [1000.0]
    monkeypatch.setattr(rate_limits, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def live(serve: Callable[..., Live], tmp_path: Path) -> Live:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    file.chmod(0o600)
    return serve(FakeEngine(), ServerConfig(api_key_file=str(file)))


def use(live: Live, key: str) -> None:
    live.http.headers["Authorization"] = f"Bearer {key}"


def test_requests_beyond_the_limit_are_refused(live: Live, clock: list[float]) -> None:
    use(live, "few-key")
    left = [live.complete(max_tokens=1).headers["x-ratelimit-remaining-requests"] for _ in range(3)]
    assert left == ["2", "1", "0"]
    refused = live.complete(max_tokens=1)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "20"
    assert refused.headers["x-ratelimit-limit-requests"] == "3"
    assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "RateLimitError")
    assert "3 requests per minute" in error["message"]
    message = live.post("/v1/messages", model="toy", max_tokens=1, messages=[]).json()
    assert message["error"]["type"] == "rate_limit_error"
    assert live.http.get("/v1/models").status_code == 200, "what only reads is not counted"
    clock[0] += 20
    assert live.complete(max_tokens=1).status_code == 200
    assert live.complete(max_tokens=1).status_code == 429


def test_tokens_of_prompts_and_answers_count(live: Live, clock: list[float]) -> None:
    use(live, "short-key")
    response = live.complete("abcd", max_tokens=4)
    assert (response.status_code, response.headers["x-ratelimit-remaining-tokens"]) == (200, "2")
    long = live.complete("abcd", max_tokens=10, stream=True)
    assert (long.status_code, long.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
    assert "x-ratelimit-limit-requests" not in long.headers
    refused = live.complete(max_tokens=1)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "78"), "12 tokens of debt, and one to use"
    clock[0] += 78
    assert live.complete(max_tokens=1).status_code == 200


def test_other_keys_are_not_concerned(live: Live, clock: list[float]) -> None:
    use(live, "few-key")
    assert [live.complete(max_tokens=1).status_code for _ in range(4)] == [200, 200, 200, 429]
    use(live, "free-key")
    response = live.complete(max_tokens=1)
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0ms"), (0.02, "20ms"), (8.64, "8.64s"), (90, "1m30s")])
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
