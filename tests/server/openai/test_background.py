"""/v1/responses in the background: polling, cancelling, events that are asked for again."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from server.apis.openai.responses.background import Background, BackgroundResponse
from server.http.errors import APIError
from tests.server.openai.test_responses import PATH, without_ids
from tests.support.fake_engine import ANSWER
from tests.support.live_server import Live, wait_until


def status_of(live: Live, response_id: str) -> str:
    status: str = live.http.get(f"{PATH}/{response_id}").json()["status"]
    return status


def replay(live: Live, response_id: str, **params: Any) -> list[dict[str, Any]]:
    text = live.http.get(f"{PATH}/{response_id}", params={"stream": True, **params}).text
    return [json.loads(block.partition("data: ")[2]) for block in text.removesuffix("\n\n").split("\n\n")]


def test_polling(client: openai.OpenAI, live: Live) -> None:
    live.engine.holds = True
    begun = client.responses.create(model="toy", input="Hi", background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    assert client.responses.retrieve(begun.id).status == "in_progress"
    early = live.post(PATH, input="And?", previous_response_id=begun.id)
    assert (early.status_code, early.json()["error"]["param"]) == (400, "previous_response_id")
    live.engine.holds = False
    wait_until(lambda: status_of(live, begun.id) == "completed")
    whole = live.http.get(f"{PATH}/{begun.id}").json()
    direct = live.post(PATH, input="Hi", model="toy").json()
    assert without_ids(whole) == without_ids(direct) | {"background": True}
    assert live.post(PATH, input="And?", previous_response_id=begun.id).status_code == 200


def test_cancelling(client: openai.OpenAI, live: Live) -> None:
    live.engine.holds_after = 3
    begun = client.responses.create(model="toy", input="Hi", background=True)
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert client.responses.cancel(begun.id).status == "cancelled", "again changes nothing"
    assert not live.engine.active
    events = replay(live, begun.id)
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")
    live.engine.holds_after = None
    other = live.post(PATH, input="Hi").json()["id"]
    assert live.http.post(f"{PATH}/{other}/cancel").status_code == 400
    assert live.http.post(f"{PATH}/resp_x/cancel").status_code == 404


def test_a_client_that_leaves_asks_for_the_other_events(live: Live) -> None:
    live.engine.delay = 0.005
    body = {"input": "Hi", "stream": True, "background": True, "request_id": "far"}
    with live.http.stream("POST", PATH, json=body) as response:
        first = next(response.iter_lines())
    assert first == "event: response.created"
    rest = replay(live, "resp_far", starting_after=1)
    assert [event["sequence_number"] for event in rest] == list(range(2, 2 + len(rest)))
    assert rest[-1]["type"] == "response.completed"
    assert "".join(e["delta"] for e in rest if e["type"] == "response.output_text.delta") == ANSWER
    wait_until(lambda: status_of(live, "resp_far") == "completed")
    assert replay(live, "resp_far", starting_after=1) == rest
    assert [event["type"] for event in replay(live, "resp_far")[:2]] == ["response.created", "response.in_progress"]
    plain = live.post(PATH, input="Hi").json()["id"]
    error = live.http.get(f"{PATH}/{plain}", params={"stream": True}).json()["error"]
    assert (error["code"], error["param"]) == (400, "stream")


def test_failing_and_deleting(live: Live) -> None:
    live.engine.fail_after = 3
    failed = live.post(PATH, input="Hi", background=True).json()["id"]
    wait_until(lambda: status_of(live, failed) == "failed")
    assert replay(live, failed)[-1]["type"] == "response.failed"
    live.engine.fail_after, live.engine.holds_after = None, 3
    begun = live.post(PATH, input="Hi", background=True).json()["id"]
    assert live.http.delete(f"{PATH}/{begun}").json()["deleted"]
    assert live.http.get(f"{PATH}/{begun}").status_code == 404
    live.wait_idle()


async def _all(running: BackgroundResponse) -> list[bytes]:
    return [data async for data in running.follow(-1)]


def test_the_longest_events_go_when_there_are_too_many() -> None:
    asyncio.run(_the_longest_events_go())


async def _the_longest_events_go() -> None:
    background, go = Background(max_bytes=1000), asyncio.Event()
    short, long = [BackgroundResponse({"id": name}, []) for name in "ab"]

    async def events(running: BackgroundResponse, size: int) -> AsyncGenerator[bytes, None]:
        for number in range(4):
            running.events.append(b"%d" % number * size)
            yield b""
        await go.wait()

    background.start("me", short, events(short, 10))
    background.start("me", long, events(long, 200))
    following = asyncio.create_task(_all(long))
    with pytest.raises(APIError, match="up to a limit"):
        await following
    assert (long.is_kept, short.is_kept) == (False, True)
    assert background.get("you", "a") is None
    assert background.get("me", "a") is short
    go.set()
    await long.over()
    await short.over()
    assert [data async for data in short.follow(1)] == [b"2" * 10 + b"3" * 10]
    assert background.get("me", "a") is None
