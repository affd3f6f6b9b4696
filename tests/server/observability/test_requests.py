"""Records of requests: where their time went, whose they are, what keys use."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine import SamplingParams
from engine.processing.output_collector import RequestMetrics, RequestUpdate
from server.metrics import Metrics, SampleWatch
from server.observability import requests
from server.observability.requests import RequestLog, RequestRecord
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live

MINE, THEIRS, ADMIN = [{"Authorization": f"Bearer {key}"} for key in ("k1", "k2", "k3")]


def record(request_id: str, owner: str = "", received: float = 0.0, *samples: SampleWatch) -> RequestRecord:
    return RequestRecord(
        request_id, f"http-{request_id}", owner, "toy", 1.7e9, received, 1, list(samples) or [sample()]
    )


def sample(num_tokens: int = 0, guided: bool = False, timings: RequestMetrics | None = None) -> SampleWatch:
    metrics: Metrics = None  # type: ignore[assignment]
    return SampleWatch(metrics, 10, None, True, guided, num_tokens, 0, timings)


def test_a_request_s_stages_add_up() -> None:
    timings = RequestMetrics(10.5, 11.0, 13.0, 17.0, 25.0)
    free, guided = sample(3, False, timings), sample(3, True, timings)
    r = record("a", "", 10.0, free, guided)
    assert r.stages(free) == {"preparation": 0.5, "queue": 2.5, "prefill": 4.0, "decode": 8.0}
    assert r.stages(guided) == {"preparation": 0.5, "grammar": 0.5, "queue": 2.0, "prefill": 4.0, "decode": 8.0}
    assert sum(r.stages(guided).values()) == 25.0 - 10.0
    assert r.stages(sample()) == {}, "nothing is over yet"


def test_why_a_prompt_was_not_cached_is_shown_and_counted() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, "toy", (), max_model_len=100, block_size=16)
    timings = RequestMetrics(1.0, 1.0, 1.0, 1.0, 1.0, prefix_miss="evicted", num_known_tokens=48, num_drafted=(5, 8))
    watch = metrics.watch(64, SamplingParams())
    watch.observe(RequestUpdate("", [1], None, None, None, 16, timings))
    watch.observe(RequestUpdate("", [1], None, None, None, 16, timings))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "toy", "engine": "0", **labels})

    assert value("quire:prefix_misses_total", reason="evicted") == 1
    assert value("quire:prefix_misses_total", reason="other_tokens") == 0
    assert value("quire:prefix_evicted_tokens_total") == 32
    (choice,) = record("a", "", 0.0, watch).as_dict()["choices"]
    assert (choice["prefix_miss"], choice["cached_tokens"], choice["known_tokens"]) == ("evicted", 16, 48)
    assert (choice["num_accepted_draft_tokens"], choice["num_draft_tokens"]) == (5, 8)


def test_ended_requests_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_ENDED", 3)
    monkeypatch.setattr(requests, "MAX_ENDED_SAMPLES", 5)
    log = RequestLog()

    def end(r: RequestRecord) -> None:
        log.begin(r)
        log.end(r)

    for request_id in "abcd":
        end(record(request_id))
    assert [r.id for r in log.newest("", 10)] == ["d", "c", "b"]
    assert log.find("", "a") is None
    end(record("e", "", 0.0, *[sample() for _ in range(4)]))
    assert [r.id for r in log.newest("", 10)] == ["e", "d"], "samples count, too"
    end(record("d"))
    assert [r.id for r in log.newest("", 10)] == ["d", "e"], "an id that is used again stands for the later request"
    running = record("f")
    log.begin(running)
    assert [r.id for r in log.newest("", 2)] == ["f", "d"]
    assert log.find("", "http-f") is running


def test_usage_of_keys_counts_running_requests_too() -> None:
    log = RequestLog()
    started = RequestMetrics(time.monotonic())
    first, second = record("a", "alice", 0.0, sample(5, False, started)), record("b", "alice", time.monotonic() - 9)
    for r in (first, second, record("c", "", time.monotonic())):
        log.begin(r)

    def values(name: str) -> list[float | None]:
        registry = CollectorRegistry()
        registry.register(log.usage(None))
        return [registry.get_sample_value(f"quire:key_{name}", {"key": key}) for key in ("alice", "anonymous")]

    before = [values(name) for name in ("requests_total", "prompt_tokens_total", "generation_tokens_total")]
    assert before == [[2, 1], [10, 0], [5, 0]]
    assert values("requests_running") == [2, 1]
    (oldest,) = log.collect()
    assert 9 <= oldest.samples[0].value < 100
    log.end(first)
    assert [values(name) for name in ("requests_total", "prompt_tokens_total", "generation_tokens_total")] == before
    assert values("requests_running") == [1, 1]


@pytest.fixture
def guarded(serve: Callable[..., Live]) -> Live:
    return serve(FakeEngine(), ServerConfig(api_key=("k1", "k2")))


def ask(live: Live, headers: dict[str, str], **body: Any) -> dict[str, Any]:
    answer = live.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4, **body}, headers=headers)
    found: dict[str, Any] = answer.json()
    return found


def test_a_request_is_told_to_its_key_only(guarded: Live) -> None:
    http = guarded.http
    answer = ask(guarded, MINE | {"X-Request-Id": "trace-7"}, n=2)
    found = http.get(f"/requests/{answer['id']}", headers=MINE).json()
    assert found == http.get("/requests/trace-7", headers=MINE).json()
    assert found["id"] == answer["id"]
    assert found["x_request_id"] == "trace-7"
    assert found["status"] == "finished"
    first, second = found["choices"]
    assert (first["finish_reason"], first["prompt_tokens"], first["completion_tokens"]) == ("length", 2, 4)
    assert first["seconds"].keys() == {"preparation", "queue", "prefill", "decode"}
    assert min(*first["seconds"].values(), *second["seconds"].values()) >= 0
    assert found["seconds"] >= sum(first["seconds"].values()) - 1e-4
    assert "Hi" not in str(found)
    for unknown in (f"/requests/{answer['id']}", "/requests/trace-7"):
        assert http.get(unknown, headers=THEIRS).status_code == 404
        assert http.get(unknown).status_code == 401
    assert [each["id"] for each in http.get("/requests", headers=MINE).json()["data"]] == [answer["id"]]
    assert http.get("/requests", headers=THEIRS).json()["data"] == []


def test_a_request_is_told_while_it_runs(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine())
    live.engine.holds_after = 3
    body = {"prompt": "Hi", "stream": True, "max_tokens": 200, "ignore_eos": True, "request_id": "mine"}
    with live.http.stream("POST", "/v1/completions", json=body) as response:
        chunks = response.iter_raw()  # without it the stream is closed
        next(chunks)
        found = live.http.get("/requests/cmpl-mine").json()
        assert found["status"] == "running"
        (choice,) = found["choices"]
        assert choice["finish_reason"] is None
        assert "prefill" in choice["seconds"]
    live.wait_idle()
    (choice,) = live.http.get("/requests/cmpl-mine").json()["choices"]
    assert choice["finish_reason"] == "abort"


def test_a_request_can_ask_how_its_prefix_was_found(serve: Callable[..., Live]) -> None:
    http = serve(FakeEngine()).http
    body, asks, note = {"prompt": "Hi", "max_tokens": 4}, {"X-Quire-Debug": "prefix"}, "prompt=2; cached=1; known=0; "
    answer = http.post("/v1/completions", json=body, headers=asks)
    assert answer.headers["x-quire-prefix"].startswith(note)
    assert "x-quire-prefix" not in http.post("/v1/completions", json=body).headers
    assert "x-quire-prefix" not in http.get("/v1/models", headers=asks).headers
    refused = http.post("/v1/completions", json=body | {"max_tokens": -1}, headers=asks)
    assert (refused.status_code, "x-quire-prefix" in refused.headers) == (400, False)
    events = http.post("/v1/completions", json=body | {"stream": True}, headers=asks).text.split("\n\n")
    comment, end = events[-3:-1]
    assert comment.startswith(f": x-quire-prefix {note}")
    assert end == "data: [DONE]"
    assert "x-quire" not in http.post("/v1/completions", json=body | {"stream": True}).text


def test_one_owner_s_records_never_push_out_another_s() -> None:
    log = RequestLog()
    big = [record(f"big-{i}", "eve", 0.0, *[sample() for _ in range(2048)]) for i in range(3)]
    for r in (record("small", "alice"), *big):
        log.begin(r)
        log.end(r)
    assert [r.id for r in log.newest("alice", 10)] == ["small"]
    assert [r.id for r in log.newest("eve", 10)] == ["big-2"]
    assert [r.id for r in log.newest(None, 10)] == ["big-2", "small"]


@pytest.fixture
def ruled(serve: Callable[..., Live], tmp_path: Path) -> Live:
    """A server of two keys and an admin's."""
    file = tmp_path / "keys.yaml"
    file.write_text("alice: k1\nbob: k2\nops: {key: k3, admin: true}\n")
    return serve(FakeEngine(), ServerConfig(api_key_file=str(file), open_metrics=True))


def usage_seen(live: Live, headers: dict[str, str]) -> list[tuple[str, str]]:
    text = live.http.get("/metrics", headers=headers).text
    assert "quire:oldest_waiting_seconds" in text
    assert "vllm:prompt_tokens_total" in text, "totals are everyone's"
    return re.findall(r'^quire:key_generation_tokens_total\{key="(.*?)"\} (\S+)', text, re.MULTILINE)


def test_only_an_admin_sees_the_usage_of_other_keys(ruled: Live, serve: Callable[..., Live]) -> None:
    for who in (MINE, MINE, THEIRS):
        ask(ruled, who)
    assert usage_seen(ruled, ADMIN) == [("alice", "8.0"), ("bob", "4.0")]
    assert usage_seen(ruled, MINE) == [("alice", "8.0")]
    assert usage_seen(ruled, {}) == [], "of --open-metrics"
    alone = serve(FakeEngine(), ServerConfig(api_key=("k1",)))
    ask(alone, MINE)
    assert usage_seen(alone, MINE) == [("key-1", "4.0")]
    anyone = serve(FakeEngine())
    ask(anyone, {})
    assert usage_seen(anyone, {}) == [("anonymous", "4.0")]


def test_only_an_admin_reads_the_requests_of_other_keys(ruled: Live) -> None:
    ids = [ask(ruled, who)["id"] for who in (MINE, THEIRS)]

    def listed(path: str, who: dict[str, str]) -> Any:
        response = ruled.http.get(path, headers=who)
        return [each["id"] for each in response.json()["data"]] if response.is_success else response.status_code

    assert listed("/requests", ADMIN) == ids[::-1]
    assert listed("/requests?key=alice", ADMIN) == listed("/requests?key=alice", MINE) == ids[:1]
    assert listed("/requests?key=alice", THEIRS) == 403
    assert ruled.http.get(f"/requests/{ids[0]}", headers=ADMIN).json()["key"] == "alice"
    assert ruled.http.get(f"/requests/{ids[0]}?key=bob", headers=ADMIN).status_code == 404
    assert ruled.http.get(f"/requests/{ids[0]}?key=alice", headers=THEIRS).status_code == 403
