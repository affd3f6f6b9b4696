"""Everything around the completions: models, health, version, page, OpenAPI, metrics, the statistics line."""

import asyncio
import dataclasses
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import engine as quire
from engine.core.batch import SchedulerStats
from server.metrics import log_statistics, statistics_line
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live


def stats(**values: int) -> SchedulerStats:
    needed = (field.name for field in dataclasses.fields(SchedulerStats) if field.default is dataclasses.MISSING)
    fields: dict[str, Any] = dict.fromkeys(needed, 0) | values
    return SchedulerStats(**fields)


def test_models(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), served_model_names=["org/one", "two"])
    body = live.http.get("/v1/models").json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["org/one", "two"]
    card = body["data"][1]
    (permission,) = card.pop("permission")
    assert permission["object"] == "model_permission"
    assert permission["allow_sampling"] is True
    assert isinstance(card.pop("created"), int)
    assert card == {
        "id": "two",
        "object": "model",
        "owned_by": "quire",
        "root": "org/one",
        "parent": None,
        "max_model_len": 512,
        "input_modalities": ["text"],
        "output_modalities": ["text"],
    }
    assert live.http.get("/v1/models/org/one").json() == body["data"][0]


def test_version_page_and_reference(live: Live) -> None:
    assert live.http.get("/version").json() == {"version": quire.__version__}
    page = live.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in re.findall(r'(?:href|src)="(static/[^"]+)"', page.text):
        assert live.http.get("/" + path).status_code == 200, path
    schema = live.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= schema["paths"].keys()
    fields = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "temperature", "logit_bias", "user"} <= fields.keys()
    assert live.http.get("/docs").status_code == 200


def metrics(live: Live) -> dict[str, float]:
    """Each sample of vllm's and http's metrics by its name and labels."""
    found = {}
    for line in live.http.get("/metrics").text.splitlines():
        if line.startswith(("vllm:", "http_")) and "_created" not in line:
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def test_metrics(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), served_model_names=["toy"])
    labels = '{engine="0",model_name="toy"}'
    assert f"vllm:num_requests_running{labels}" not in metrics(live), "unknown before the first step"
    live.chat(max_tokens=5)
    live.complete(n=2, max_tokens=10)
    live.complete("x" * 600)
    found = metrics(live)
    prompt = len("_user\nHi_\n_assistant\n")
    assert found["vllm:num_requests_running" + labels] >= 1
    assert found["vllm:kv_cache_usage_perc" + labels] == found["vllm:num_requests_running" + labels] / 32
    assert found["vllm:generation_tokens_total" + labels] == 25
    assert found["vllm:corrupted_requests_total" + labels] == 3
    assert found["vllm:prompt_tokens_total" + labels] == prompt + 4
    assert found["vllm:prompt_tokens_cached_total" + labels] == 5
    assert found['vllm:prompt_tokens_by_source_total{engine="0",model_name="toy",source="local_cache_hit"}'] == 5
    assert found['vllm:request_success_total{engine="0",finished_reason="length",model_name="toy"}'] == 3
    for name in (
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "corrupted_requests_total",
        "num_requests_waiting",
    ):
        assert f"vllm:{name}{labels}" in found
    histograms = {
        "time_to_first_token_seconds": 3,
        "inter_token_latency_seconds": 4 + 9 + 9,
        "request_time_per_output_token_seconds": 3,
        "e2e_request_latency_seconds": 3,
        "request_queue_time_seconds": 3,
        "request_inference_time_seconds": 3,
        "request_prefill_time_seconds": 3,
        "request_decode_time_seconds": 3,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 3,
        "request_params_max_tokens": 3,
        "request_num_preemptions": 3,
        "request_prefill_kv_computed_tokens": 3,
        "request_max_num_generation_tokens": 2,
        "request_params_n": 2,
    }
    for name, count in histograms.items():
        assert found[f"vllm:{name}_count{labels}"] == count, name
    assert found['vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="toy"}'] <= 3
    assert found['vllm:request_prompt_tokens_bucket{engine="0",le="500.0",model_name="toy"}'] == 3
    assert found['vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="32"}'] == 1
    assert found['http_requests_total{handler="/v1/completions",method="POST",status="4xx"}'] == 1
    assert found['http_request_duration_seconds_count{handler="/v1/chat/completions",method="POST"}'] == 1
    live.http.request("PROPFIND", "/coffee/1")
    live.http.request("GET", "/coffee/2")
    found = metrics(live)
    assert found['http_requests_total{handler="none",method="other",status="4xx"}'] == 1
    assert found['http_requests_total{handler="none",method="GET",status="4xx"}'] == 1
    assert "process_resident_memory_bytes" in live.http.get("/metrics").text


def test_abandoned_requests_are_counted(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine())
    live.engine.holds_after = 3
    with live.http.stream(
        "POST", "/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 300}
    ) as response:
        next(response.iter_raw())
    live.wait_idle()
    assert metrics(live)['vllm:request_success_total{engine="0",finished_reason="abort",model_name="toy"}'] == 1


def test_statistics_line() -> None:
    before = stats(prompt_tokens=100, generation_tokens=1000)
    after = stats(
        prompt_tokens=600,
        generation_tokens=3345,
        num_running=3,
        num_waiting=1,
        num_blocks=1000,
        num_free_blocks=875,
        prefix_queries=200,
        prefix_hits=50,
    )
    assert statistics_line(before, after, 10.0) == (
        "Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 234.5 tokens/s, Running: 3 reqs, "
        "Waiting: 1 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    )
    assert "throughput: 60.0 tokens/s" in statistics_line(None, after, 10.0)
    encoded = replace(after, num_encoded=7, encoder_seconds=1.5)
    assert statistics_line(after, encoded, 10.0).endswith(", Images: 7 encoded in 1.50 s")
    restarted = stats(prompt_tokens=20, generation_tokens=500)
    assert "throughput: 50.0 tokens/s" in statistics_line(after, restarted, 10.0), "another process counts from 0"


def test_statistics_are_logged_while_something_happens(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        task = asyncio.create_task(log_statistics(lambda: history[0], 0.01))
        for newest in (None, stats(generation_tokens=1), stats(generation_tokens=1)):
            history[0] = newest
            await asyncio.sleep(0.05)
        task.cancel()

    history: list[SchedulerStats | None] = [None]
    with caplog.at_level(logging.INFO, "server.metrics"):
        asyncio.run(main())
    assert [record.message[:4] for record in caplog.records] == ["Avg "]


def test_requests_are_logged_when_asked(serve: Callable[..., Live], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "server"):
        serve(FakeEngine()).complete("secret words")
        assert not [record for record in caplog.records if record.name.startswith("server")]
        live = serve(FakeEngine(), ServerConfig(enable_log_requests=True))
        secrets = {"stop": ["a secret"], "bad_words": ["secret"], "structured_outputs": {"choice": ["secret"]}}
        live.complete("secret words", temperature=0.5, logit_bias={"7": 5}, allowed_token_ids=[7, 8], **secrets)
    (record,) = [record for record in caplog.records if record.name.startswith("server")]
    assert "12 prompt tokens" in record.message
    assert "temperature=0.5" in record.message
    for text in ("secret", "[7", "{"):
        assert text not in record.message


@pytest.mark.parametrize(
    "path", ["/v1/models", "/health", "/metrics", "/", "/v1/models/toy", "/v1/models/x", "/version"]
)
def test_head_is_get_without_the_body(live: Live, path: str) -> None:
    head, get = live.http.head(path), live.http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers.get("content-type") == get.headers.get("content-type")
    assert live.http.get("/health").status_code == 200, "the connection goes on"


def test_head_of_what_has_no_get(live: Live) -> None:
    assert live.http.head("/v1/completions").status_code == 405
    assert 'method="HEAD"' in live.http.get("/metrics").text


def test_tokenizer_info(live: Live) -> None:
    info = live.http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["vocab_size"], info["model_max_length"]) == ("<|im_end|>", 259, 512)
    assert "<|im_start|>" in info["chat_template"]


def test_the_prefix_cache_is_emptied(live: Live) -> None:
    assert live.post("/reset_prefix_cache").json() == {"reset": True}
    assert live.engine.num_resets == 1
    live.engine.active["running"] = []
    refused = live.post("/reset_prefix_cache")
    assert refused.status_code == 409
    assert refused.json()["error"]["message"] == "the prefix cache is in use: requests are running"
    del live.engine.active["running"]
    live.engine.states.enter("dead", reason="it was killed")
    dead = live.post("/reset_prefix_cache")
    assert dead.status_code == 503
    assert "it was killed" in dead.json()["error"]["message"]
    assert live.engine.num_resets == 1


def test_a_model_sleeps_and_wakes_up(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine(), served_model_names=["toy"])

    def state(name: str) -> float:
        return metrics(live)[f'vllm:engine_sleep_state{{engine="0",model_name="toy",sleep_state="{name}"}}']

    assert live.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert (state("awake"), state("weights_offloaded"), state("discard_all")) == (1, 0, 0)
    live.engine.active["running"] = []
    slept = live.http.post("/sleep?level=2")
    assert (slept.status_code, slept.content) == (200, b"")
    assert live.engine.aborted == {"running"}
    assert live.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert (state("awake"), state("weights_offloaded"), state("discard_all")) == (0, 0, 1)
    ready = live.http.get("/readyz")
    assert (ready.status_code, ready.json()["phase"]) == (503, "asleep")
    assert live.http.get("/health").status_code == 200, "a supervisor need not restart it"
    refused = live.complete("Hi")
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the model is asleep")
    assert live.post("/tokenize", prompt="Hi").status_code == 200
    assert live.http.post("/wake_up").status_code == 200
    assert live.complete("Hi").status_code == 200
    assert live.http.post("/sleep").status_code == 200
    assert state("weights_offloaded") == 1
    live.engine.cannot_sleep = "cuda:0: too little free memory to wake up"
    failed = live.http.post("/wake_up")
    assert (failed.status_code, failed.json()["error"]["message"]) == (503, live.engine.cannot_sleep)
    wrong = live.http.post("/sleep?level=3")
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (400, "level: must be 1 or 2, got 3")
    assert live.http.post("/sleep?mode=keep").status_code == 400


def test_weights_are_replaced(serve: Callable[..., Live]) -> None:
    live = serve(FakeEngine())
    assert live.http.get("/v1/weights").json() == {"path": "first", "version": 0}
    live.engine.active["running"] = []
    replaced = live.http.post("/v1/weights?path=/models/step-2")
    assert (replaced.status_code, replaced.json()) == (200, {"path": "/models/step-2", "version": 1})
    assert not live.engine.aborted, "it waits for running requests"
    assert live.http.post("/v1/weights?path=/models/step-3&mode=abort").json()["version"] == 2
    assert live.engine.aborted == {"running"}
    live.engine.cannot_sleep = "there is no folder /models/step-4"
    failed = live.http.post("/v1/weights?path=/models/step-4")
    assert (failed.status_code, failed.json()["error"]["message"]) == (409, live.engine.cannot_sleep)
    assert live.http.get("/v1/weights").json() == {"path": "/models/step-3", "version": 2}
    assert live.http.post("/v1/weights").status_code == 400


def test_sleep_may_wait_for_running_requests(live: Live) -> None:
    live.engine.active["running"] = []
    assert live.http.post("/sleep?mode=wait").status_code == 200
    assert not live.engine.aborted
    del live.engine.active["running"]


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/sleep", "/wake_up"])
def test_only_some_keys_may_do_what_concerns_others(serve: Callable[..., Live], tmp_path: Path, path: str) -> None:
    (tmp_path / "keys.yaml").write_text(
        "plain: {key: aaa, priority: true}\nfirst: {key: bbb, priority: true, admin: true}\n"
    )
    live = serve(FakeEngine(), ServerConfig(api_key_file=str(tmp_path / "keys.yaml")))
    answers = [
        live.http.post(path, headers={"Authorization": f"Bearer {key}"}).status_code for key in ("aaa", "bbb", "ccc")
    ]
    assert answers == [403, 200, 401]
