"""The server before its engine is ready and while it stops: what probes, clients and people are told."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable

import httpx
import pytest

from server.observability import readiness as readiness_module
from tests.support.starting import Starting

Check = Callable[[httpx.AsyncClient, "Starting"], Awaitable[None]]


def run(check: Check, **settings: object) -> None:
    async def main() -> None:
        starting = Starting(**settings)
        transport = httpx.ASGITransport(starting.switch)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            await check(http, starting)

    asyncio.run(main())


def test_probes_say_how_far_the_start_is() -> None:
    async def check(http: httpx.AsyncClient, starting: Starting) -> None:
        states = starting.engine.states
        states.advance("loading", 0.25)
        assert (await http.get("/livez")).status_code == 200
        answer = await http.get("/readyz")
        assert answer.status_code == 503
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        found = answer.json()
        assert (found["phase"], found["fraction"], found["num_restarts"]) == ("loading", 0.25, 0)
        for path in ("/health", "/ping"):
            answer = await http.get(path)
            assert (answer.status_code, answer.content) == (503, b"")
        assert (await http.get("/health", headers={"Accept": "application/json"})).json()["phase"] == "loading"
        starting.open()
        answer = await http.get("/readyz")
        assert (answer.status_code, answer.json()["phase"]) == (200, "ready")
        assert "retry-after" not in answer.headers
        answer = await http.get("/health")
        assert (answer.status_code, answer.content) == (200, b"")
        states.enter("restarting", reason="gone")
        assert (await http.get("/readyz")).status_code == (await http.get("/health")).status_code == 503
        assert (await http.get("/livez")).status_code == 200

    run(check)


def test_the_first_requests_of_a_ready_engine_wait_for_its_app() -> None:
    """It is made after the engine became ready. A client that saw that must not be refused."""

    async def check(http: httpx.AsyncClient, starting: Starting) -> None:
        starting.engine.states.enter("ready")
        requests = [
            asyncio.create_task(http.get("/readyz")),
            asyncio.create_task(http.post("/v1/completions", json={})),
        ]
        done, _ = await asyncio.wait(requests, timeout=0.2)
        assert not done
        starting.open()
        assert [(await request).status_code for request in requests] == [200, 400]

    run(check)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "ServiceUnavailableError"), ("/v1/messages", "overloaded_error"), ("/tokenize", None)],
)
def test_requests_are_told_to_come_again_in_the_shape_of_their_api(path: str, kind: str | None) -> None:
    async def check(http: httpx.AsyncClient, starting: Starting) -> None:
        answer = await http.post(path, json={})
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert len(answer.headers["x-request-id"]) == 32
        error = answer.json()["error"]
        assert "loading" in error["message"]
        assert kind is None or error["type"] == kind
        starting.open()
        assert (await http.post(path, json={})).status_code == 400

    run(check)


def test_keys_guard_what_there_is() -> None:
    async def check(http: httpx.AsyncClient, starting: Starting) -> None:
        for path in ("/metrics", "/v1/models"):
            assert (await http.get(path)).status_code == 401
        key = {"Authorization": "Bearer k"}
        assert (await http.get("/v1/models", headers=key)).status_code == 503
        text = (await http.get("/metrics", headers=key)).text
        assert 'quire:engine_state{state="loading"} 1.0' in text
        assert 'quire:engine_state{state="ready"} 0.0' in text
        starting.open()
        text = (await http.get("/metrics", headers=key)).text
        assert 'quire:engine_state{state="ready"} 1.0' in text
        assert 'http_requests_total{handler="none",method="GET",status="4xx"} 2.0' in text, "counters go on"

    run(check, api_key=("k",))


def test_the_page_needs_no_engine() -> None:
    async def check(http: httpx.AsyncClient, starting: Starting) -> None:
        page = await http.get("/")
        assert page.status_code == 503
        assert "retry-after" in page.headers
        files = re.findall(r'(?:src|href)="(static/[^"]+)"', page.text)
        assert "static/js/app.js" in files
        for file in files:
            assert (await http.get(f"/{file}")).status_code == 200, file
        starting.open()
        ready = await http.get("/")
        assert (ready.status_code, ready.text) == (200, page.text)

    run(check)
    run(check, api_key=("k",))


def test_a_stream_tells_each_phase_and_ends_with_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness_module, "EVENT_SECONDS", (0.0, 0.01))

    async def check(http: httpx.AsyncClient, starting: Starting) -> None:
        events = [event async for event in starting.readiness.events() if await advance(starting)]
        phases = [event["phase"] for event in events]
        assert phases[0] == "loading"
        assert phases[-2:] == ["capturing", "ready"]
        starting.open()
        answer = await http.get("/readyz", headers={"Accept": "text/event-stream"})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert json.loads(answer.text.removeprefix("data: "))["phase"] == "ready"

    left = iter(["compiling", "capturing", "ready"])

    async def advance(starting: Starting) -> bool:
        if (phase := next(left, None)) is not None:
            starting.engine.states.enter(phase)
        return True

    run(check)


def test_a_server_that_stops_takes_nothing_new() -> None:
    async def check(http: httpx.AsyncClient, starting: Starting) -> None:
        starting.open()
        starting.readiness.is_draining = True
        answer = await http.get("/readyz")
        assert (answer.status_code, answer.json()["phase"]) == (503, "draining")
        answer = await http.post("/v1/completions", json={"prompt": "Hi"})
        assert answer.status_code == 503
        assert "draining" in answer.json()["error"]["message"]
        assert (await http.get("/v1/models")).status_code == 200
        assert "vllm:" in (await http.get("/metrics")).text

    run(check)
