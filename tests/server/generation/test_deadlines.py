"""Requests with a time-out: 504 when there is no answer in time, else what there is of it."""

import asyncio
import time
from typing import Any

import pytest

from engine import SamplingParams
from server.http.reading import Bodies
from tests.support.live_server import Live

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "model": "toy", "max_tokens": 50},
}


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_has_not_begun_in_time_is_an_error(live: Live, path: str) -> None:
    live.engine.time_out_after = 0
    before = time.monotonic()
    response = live.post(path, **BODIES[path], timeout_ms=5000)
    assert response.status_code == 504, response.text
    assert "timeout_ms: the request timed out before the answer began" in response.json()["error"]["message"]
    [deadline] = live.engine.deadlines
    assert before + 5 <= deadline <= time.monotonic() + 5
    assert live.post(path, **BODIES[path]).status_code == 200
    assert live.engine.deadlines[1] == 0


def test_an_answer_that_has_begun_ends_as_it_is(live: Live) -> None:
    live.engine.time_out_after = 3
    choice = live.complete(timeout_ms=5000).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], len(choice["text"])) == ("abort", "timeout", 3)
    choice = live.chat(timeout_ms=5000).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout")
    assert choice["message"]["content"]
    assert live.post("/v1/responses", input="Hi", timeout_ms=5000).json()["status"] == "incomplete"
    answer = live.post("/v1/messages", timeout_ms=5000, **BODIES["/v1/messages"]).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)


def test_streams_say_it_too(live: Live) -> None:
    live.engine.time_out_after = 3
    assert '"finish_reason":"abort","stop_reason":"timeout"' in live.complete(timeout_ms=5000, stream=True).text
    live.engine.time_out_after = 0
    text = live.complete(timeout_ms=5000, stream=True).text
    assert "the request timed out" in text
    assert text.endswith("data: [DONE]\n\n")


def test_a_request_that_is_being_prepared_ends_in_time(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of its grammar waits until the test ends."""

    async def prepare(sampling: SamplingParams, tenant: str = "") -> SamplingParams:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    monkeypatch.setattr(live.engine, "prepare", prepare)
    assert live.complete(timeout_ms=50, structured_outputs={"regex": "a"}).status_code == 504
    assert not live.engine.requests


def test_time_in_which_the_body_is_not_decoded_counts(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Bodies.checked

    async def later(self: Bodies, *args: Any) -> Any:
        await asyncio.sleep(0.05)
        return await checked(self, *args)

    monkeypatch.setattr(Bodies, "checked", later)
    assert live.complete(timeout_ms=10).status_code == 504
    assert not live.engine.requests
    assert live.complete(timeout_ms=100_000).status_code == 200


@pytest.mark.parametrize("timeout", [0, -1, 1.5, "1", 10**12])
def test_times_out_of_range_are_refused(live: Live, timeout: Any) -> None:
    assert live.complete(timeout_ms=timeout).status_code == 400
