"""The fuzz over HTTP reads a stream as it reads a whole answer, and tells another answer from the right one."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from tests.attack.pairs import Answer, Record, ask, draw_request
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import run_server

BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 5, "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 5},
    "/v1/messages": {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_is_read_as_the_whole_answer(path: str) -> None:
    async def both(url: str) -> list[Answer]:
        async with httpx.AsyncClient(base_url=url) as http:
            bodies = [BODIES[path] | {"stream": stream} for stream in (False, True)]
            return [await ask(http, {"path": path, "body": body, "hangs_up": False}) for body in bodies]

    with run_server(FakeEngine()) as live:
        whole, streamed = asyncio.run(both(f"http://127.0.0.1:{live.port}"))
    assert whole.how == "finished"
    assert whole.content[0][1][0]
    assert whole == streamed


def test_a_record_with_another_answer_does_not_hold() -> None:
    assert Record("a", compared=1).holds
    assert not Record("a").holds, "nothing was compared"
    assert not Record("a", compared=1, different=[{}]).holds
    assert not Record("a", compared=1, left={"blocks in use": 0.1}).holds


def test_requests_are_drawn_anew_by_the_seed() -> None:
    one, same, other = (draw_request(random.Random(seed)) for seed in (0, 0, 1))
    assert one == same != other
