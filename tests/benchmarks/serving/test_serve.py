"""`quire bench serve` against a stub: what it sends, prints, saves and refuses."""

import asyncio
import base64
import itertools
import json
import math
import time
from array import array
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.processes import free_port
from benchmarks.serving import serve, server_cpu
from benchmarks.serving.chat_lengths import LENGTHS
from benchmarks.serving.client import Answer
from benchmarks.serving.rate_search import Run, Window
from engine.errors import ConfigError
from server.cli import main as cli
from tests.support.stub_sse import Stub


def bench(url: str, *words: str) -> int:
    return serve.main(["--base-url", url, "--disable-tqdm", "--num-prompts", "12", "--output-len", "4", *words])


def saved(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def test_a_run_with_the_labels_and_keys_of_vllm(stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input-len", "9", "--max-concurrency", "3", "--save-result", "--result-dir", str(tmp_path)]
    assert bench(stub.url("ok"), *words, "--metadata", "gpu=none") == 0
    shown = capsys.readouterr().out
    for line in (
        "Traffic request rate: inf",
        "Burstiness factor: 1.0 (Poisson process)",
        "Maximum request concurrency: 3",
        "============ Serving Benchmark Result ============",
        "Successful requests:                     12        ",
        "Failed requests:                         0         ",
        "Total generated tokens:                  48        ",
    ):
        assert line + "\n" in shown
    assert "of a core for" in shown
    result = saved(tmp_path)
    keys = "date backend endpoint_type label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency"
    keys += " duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput"
    keys += " output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests"
    for name in ("ttft", "tpot", "itl"):
        keys += f" mean_{name}_ms median_{name}_ms std_{name}_ms p99_{name}_ms"
    assert set(keys.split()) <= result.keys()
    assert not {"ttfts", "itls", "generated_texts"} & result.keys()
    assert result["request_rate"] == "inf"
    assert result["model_id"] == "stub-model"
    assert result["gpu"] == "none"
    assert result["max_concurrent_requests"] <= 3
    assert result["server"]["version"] == {"version": "0.0.1"}
    assert result["server"]["models"][0]["max_model_len"] == 4096
    assert {"cpu_share", "loop_lag_p99_ms", "max_events_per_second"} <= result["client"].keys()
    assert result["environment"]["python"]
    assert result["cached_input_tokens"] == 12 * 5


def test_what_is_sent(stub: Stub) -> None:
    bench(stub.url("ok"), "--input-len", "9", "--seed", "5", "--temperature", "0.5", "--extra-body", '{"seed": 3}')
    test, *sent = stub.requests
    assert len(sent) == 12
    assert test["prompt"] not in [body["prompt"] for body in sent]
    assert {len(body["prompt"]) for body in sent} == {9}
    assert {**sent[0], "prompt": None} == {
        "model": "stub-model",
        "prompt": None,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.5,
        "seed": 3,
    }
    before = sorted(body["prompt"] for body in sent)
    stub.requests.clear()
    bench(stub.url("ok"), "--input-len", "9", "--seed", "5")
    assert sorted(body["prompt"] for body in stub.requests[1:]) == before


def test_chat_has_texts(stub: Stub) -> None:
    assert bench(stub.url("ok"), "--endpoint", "/v1/chat/completions", "--input-len", "3") == 0
    body = stub.requests[-1]
    assert body["max_completion_tokens"] == 4
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 3


def test_images_are_sent(stub: Stub) -> None:
    words = ["--dataset-name", "random-mm", "--endpoint", "/v1/chat/completions", "--input-len", "3"]
    words += ["--random-mm-bucket-config", "{(24, 40, 1): 2, (16, 16, 1): 1, (9, 9, 16): 0}"]

    def sent(*more: str) -> list[list[str]]:
        stub.requests.clear()
        assert bench(stub.url("ok"), *words, *more) == 0
        found = []
        for body in stub.requests[1:]:
            *images, text = body["messages"][0]["content"]
            assert len(text["text"].split()) == 3
            found.append([image["image_url"]["url"] for image in images])
        return found

    unique = [url for urls in sent("--random-mm-base-items-per-request", "2") for url in urls]
    assert len(unique) == len(set(unique)) == 24
    sizes = {Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))).size for url in unique}
    assert sizes == {(40, 24), (16, 16)}, "width, height"
    repeated = [url for urls in sent("--random-mm-num-distinct-items", "3") for url in urls]
    assert len(repeated) == 12
    assert 1 < len(set(repeated)) <= 3
    limits = ["--random-mm-base-items-per-request", "4", "--random-mm-num-mm-items-range-ratio", "0.5"]
    counts = {len(images) for images in sent(*limits, "--random-mm-limit-mm-per-prompt", '{"image": 3}')}
    assert counts == {2, 3}


def test_keys_are_sent_and_not_saved(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--api-key", "geheim", "--header", "x-org=hidden", "--save-result", "--result-dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["quire", "bench", "serve", *words])
    bench(stub.url("ok"), *words)
    assert "Authorization: Bearer geheim" in stub.headers[0]
    assert "x-org: hidden" in stub.headers[0]
    assert not any(word in next(tmp_path.glob("*.json")).read_text() for word in ("geheim", "hidden"))


def test_a_model_of_few_tokens(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(stub.url("small-vocabulary"), "--input-len", "50") == 0
    assert "random ones are below 156" in capsys.readouterr().out
    assert bench(stub.url("small-vocabulary"), "--input-len", "50", "--random-vocab-size", "5000") == 1
    assert "token ids must be below 300" in capsys.readouterr().out


def test_a_server_that_lists_no_models_needs_a_name(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(stub.url("unlisted"), "--model", "org/m") == 0
    assert stub.requests[-1]["model"] == "org/m"
    capsys.readouterr()
    assert bench(stub.url("unlisted")) == 1
    assert "HTTP 404" in capsys.readouterr().out


def test_details_and_lines_that_are_added(stub: Stub, tmp_path: Path) -> None:
    words = ["--append-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "all.json"]
    bench(stub.url("ok"), *words)
    bench(stub.url("ok"), *words)
    first, second = map(json.loads, (tmp_path / "all.json").read_text().splitlines())
    assert first["generated_texts"] == [" 0 1 2 3"] * 12
    assert [len(gaps) for gaps in second["itls"]] == [3] * 12
    assert {"input_lens", "output_lens", "ttfts", "latencies", "start_times", "queue_times", "errors"} <= first.keys()


def test_repeated_runs_have_intervals_and_other_prompts(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(stub.url("ok"), "--repeat", "3", "--save-result", "--result-dir", str(tmp_path)) == 0
    prompts = [tuple(body["prompt"]) for body in stub.requests]
    assert len(prompts) == len(set(prompts)) == 1 + 3 * 12
    result = saved(tmp_path)
    assert (result["num_runs"], result["completed"], len(result["runs"])) == (3, 36, 3)
    assert result["confidence_95"]["mean_ttft_ms"] > 0
    assert " ± " in capsys.readouterr().out


def test_failures_in_the_middle_are_counted_by_cause(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(stub.url("mostly-ok"), "--save-result", "--result-dir", str(tmp_path)) == 1
    result = saved(tmp_path)
    assert result["completed"] == 8
    assert result["failed"] == 4
    assert result["failures"] == {"error in the stream": 3, "HTTP 503": 1}
    shown = capsys.readouterr().out
    assert "Failed requests:                         4         \n" in shown
    assert "error in the stream:                     3         \n" in shown
    assert "Failed: error in the stream: out of memory (3 times)\n" in shown


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("unauthorized", "HTTP 401: wrong key"),
        ("overloaded", "HTTP 503: <html>try later</html>"),
        ("closed-midway", "connection lost: closed by the server"),
        ("error-midway", "error in the stream: out of memory"),
    ],
)
def test_a_server_that_refuses_is_asked_once(
    stub: Stub, behaviour: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(stub.url(behaviour)) == 1
    assert len(stub.requests) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Starting initial single prompt test run...",
        f"Nothing was measured. The first request failed: {message}",
    ]


@pytest.mark.parametrize("more", [[], ["--find-max-rate", "p99_ttft:500"]])
def test_a_server_that_fails_every_request_gets_no_table(
    stub: Stub, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(stub.url("ok-once"), "--save-result", "--result-dir", str(tmp_path), *more) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "Nothing was measured. All 12 requests failed.",
        "Failed: HTTP 503: <html>try later</html> (8 times)",
        "Failed: error in the stream: out of memory (4 times)",
    ]
    result = saved(tmp_path)
    assert (result["completed"], result["failed"]) == (0, 12)
    assert result["failures"] == {"HTTP 503": 8, "error in the stream": 4}


def test_a_server_that_is_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    cause = f"Nothing was measured. The first request failed: connection refused: {url.removeprefix('http://')}\n"
    assert bench(url) == bench(url, "--model", "m") == 1
    assert capsys.readouterr().out == cause * 2
    assert bench(url, "--save-result", "--result-dir", str(tmp_path)) == 1
    assert saved(tmp_path)["failures"] == {"connection refused": 1}


async def queued(benchmark: serve.Benchmark, requests: list[Any], delays: Sequence[float], title: str) -> Run:
    """A pass in which a server answers one request after the other, 4 ms each."""
    ends = list(itertools.accumulate(delays, lambda end, delay: max(end, delay) + 0.004, initial=0.0))[1:]
    answers = [Answer(9, delay, times=array("d", [end]), output_len=1) for delay, end in zip(delays, ends, strict=True)]
    return Run(
        answers,
        ends[-1],
        {"cpu_share": 0.0, "loop_lag_p99_ms": 0.0, "events_per_second": 1.0, "max_events_per_second": 1.0},
        {},
    )


@pytest.mark.parametrize(("rate", "grows"), [(50, False), (150, False), (350, True), (1000, True)])
def test_a_rate_beyond_the_servers_makes_its_queue_grow(rate: float, grows: bool) -> None:
    window = Window(rate, 3)
    delays = serve.arrival_times(window.num_prompts, rate, 1.0, 0)
    run = asyncio.run(queued(None, [], delays, ""))  # type: ignore[arg-type]  # 250 a second are answered
    assert window.grows(run.answers, delays) == grows
    assert len(window.measured(run.answers, delays)) == pytest.approx(3 * rate, rel=0.2)


def test_each_rate_is_measured_after_a_warm_up(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For three seconds. A limit that is never reached finds the capacity."""
    passes: list[int] = []

    async def counted(benchmark: serve.Benchmark, requests: list[Any], delays: Sequence[float], title: str) -> Run:
        passes.append(len(requests))
        return await queued(benchmark, requests, delays, title)

    monkeypatch.setattr(serve.Benchmark, "_pass", counted)
    words = ["--num-prompts", "400", "--find-max-rate", "ttft:400", "--find-seconds", "3", "--save-result"]
    assert bench(stub.url("ok"), *words, "--result-dir", str(tmp_path), "--burstiness", "100") == 0
    found = saved(tmp_path)["find_max_rate"]
    assert 200 < found["max_rate"] < 270, "what a queue of one server can do"
    for probe, sent in zip(found["probes"][1:], passes[1:], strict=True):
        assert sent == math.ceil(4 * probe["rate"])
    assert saved(tmp_path)["completed"] == pytest.approx(3 * found["max_rate"], abs=3)
    assert {"grows", "output_throughput", "p99_ttft_ms"} <= found["probes"][-1].keys()


def test_lengths_of_real_chats(stub: Stub) -> None:
    words = ["--dataset-name", "chat", "--num-prompts", "200"]
    assert serve.main(["--base-url", stub.url("ok"), "--disable-tqdm", *words]) == 0
    sent = stub.requests[1:]
    assert {(len(body["prompt"]), body["max_tokens"]) for body in sent} <= set(LENGTHS)
    assert len({len(body["prompt"]) for body in sent}) > 50
    prompts, answers = zip(*LENGTHS, strict=True)
    assert len(LENGTHS) == 160
    assert (np.median(prompts), np.median(answers)) == (977, 157)
    stub.requests.clear()
    assert bench(stub.url("ok"), *words[:2], "--chat-max-input-len", "300") == 0
    assert max(len(body["prompt"]) for body in stub.requests) == 300
    assert {body["max_tokens"] for body in stub.requests} == {4}


def test_cpu_of_the_servers_processes() -> None:
    def text(api: float, engine: float) -> str:
        lines = [f'quire:process_cpu_seconds_total{{process="{name}"}} {value}' for name, value in
                 (("api", 1.0), ("api_0", api), ("engine", engine))]  # fmt: skip
        return "\n".join(["process_cpu_seconds_total 7.0", *lines])

    cores = server_cpu.between(text(1, 2), text(2, 6), 4.0)
    assert cores == {"api": 0.0, "api_0": 0.25, "engine": 1.0}
    assert server_cpu.describe(cores, 10_000) == (
        "Server, cores in use: api 0.00, api_0 0.25, engine 1.00; a token takes 25.0 µs of the API's."
    )
    assert server_cpu.between("process_cpu_seconds_total 1.5", "process_cpu_seconds_total 2.5", 2) == {"api": 0.5}
    assert server_cpu.between("", "", 1) == {}


def test_find_max_rate(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """250 requests a second can be answered; that all wait in a queue shows in the time to first token."""
    monkeypatch.setattr(serve.Benchmark, "_pass", queued)
    words = ["--num-prompts", "30", "--find-max-rate", "p90_ttft:30", "--save-result", "--result-dir", str(tmp_path)]
    assert bench(stub.url("ok"), *words, "--burstiness", "100") == 0
    found = saved(tmp_path)["find_max_rate"]
    assert found["probes"][0]["rate"] == "inf"
    assert not found["probes"][0]["holds"]
    assert 220 < found["max_rate"] < 300
    assert {"rate", "holds", "p90_ttft_ms", "request_throughput"} <= found["probes"][1].keys()
    assert "Highest request rate that holds (RPS):" in capsys.readouterr().out
    (tmp_path / next(tmp_path.glob("*.json")).name).unlink()
    assert bench(stub.url("ok"), "--find-max-rate", "ttft:100000", "--save-result", "--result-dir", str(tmp_path)) == 0
    assert saved(tmp_path)["find_max_rate"]["max_rate"] == "inf"
    assert bench(stub.url("ok"), "--find-max-rate", "p50_ttft:0.01", "--num-prompts", "2") == 0
    assert "No rate holds" in capsys.readouterr().out


def test_arrival_times() -> None:
    assert serve.arrival_times(5, math.inf, 1.0, 0) == [0.0] * 5
    poisson, even = (np.diff(serve.arrival_times(4000, 20.0, shape, 0)) for shape in (1.0, 1e6))
    assert serve.arrival_times(4000, 20.0, 1.0, 0)[-1] == pytest.approx(200.0)
    assert poisson.std() / poisson.mean() == pytest.approx(1.0, abs=0.05)
    assert even.std() / even.mean() < 0.01
    assert serve.arrival_times(10, 5.0, 1.0, 1) == serve.arrival_times(10, 5.0, 1.0, 1)


def test_the_request_rate_is_kept(stub: Stub, tmp_path: Path) -> None:
    words = ["--request-rate", "60", "--save-result", "--result-dir", str(tmp_path), "--save-detailed"]
    assert bench(stub.url("ok"), *words) == 0
    result = saved(tmp_path)
    assert result["request_rate"] == 60
    expected = np.array(serve.arrival_times(12, 60.0, 1.0, 0))
    assert result["duration"] > expected[-1] - expected[0] - 0.01
    assert len(result["start_times"]) == 12
    assert result["client"]["send_lateness_p99_ms"] >= 0  # how late is the machine's affair


def test_a_busy_client_says_so() -> None:
    calm = {"cpu_share": 0.2, "loop_lag_p99_ms": 1.0, "events_per_second": 1e4, "max_events_per_second": 5e4}
    assert serve.about_clients([]) == []
    (line,) = serve.about_clients([calm])
    assert line == "Client: 20% of a core for 10,000 events/s; its own limit is about 50,000."
    (line,) = serve.about_clients([calm, calm | {"cpu_share": 0.95, "max_events_per_second": 40000.0}])
    assert line.startswith(
        "WARNING: this client took 95% of a core for 10,000 events/s; its own limit is about 40,000."
    )
    assert "up to 40 ms late" in serve.about_clients([calm | {"loop_lag_p99_ms": 40.0}])[1]
    assert "cannot keep the request rate" in serve.about_clients([calm, calm | {"send_lateness_p99_ms": 80.0}])[1]


def test_the_watch_sees_a_blocked_loop() -> None:
    async def block() -> dict[str, float]:
        async with serve.watched() as found:
            await asyncio.sleep(0.03)
            end = time.process_time() + 0.05
            while time.process_time() < end:
                pass
            await asyncio.sleep(0.03)
        return found

    found = asyncio.run(block())
    assert found["loop_lag_max_ms"] > 20
    assert found["cpu_seconds"] > 0.02
    assert 0 < found["cpu_share"] < 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset-name", "custom"], "dataset_name custom needs --dataset-path"),
        (["--dataset-path", "a.jsonl"], "dataset_path is for custom and sharegpt, but dataset_name is random"),
        (["--dataset-name", "sharegpt", "--dataset-path", "a.json"], "a sharegpt dataset needs --tokenizer"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere.txt"], "/nowhere.txt: No such file"),
        (["--dataset-name", "nano", "--output-len", "5"], "nano has answer lengths of its own"),
        (["--dataset-name", "prefix_repetition", "--num-prompts", "5"], "must be at least"),
        (["--dataset-name", "prefix_repetition", "--input-len", "5"], "input_len is for random prompts"),
        (["--dataset-name", "random-mm"], "random-mm sends images: it needs --endpoint /v1/chat/completions"),
        (["--random-mm-bucket-config", "{(9, 9, 16): 1}"], "is a video; only images"),
        (["--random-mm-bucket-config", "{(9, 9): 1}"], "must be an object such as"),
        (["--random-mm-bucket-config", "open('a')"], "must be an object such as"),
        (["--random-mm-limit-mm-per-prompt", '{"image": -1}'], "must hold numbers"),
        (["--random-range-ratio", "1"], "random_range_ratio must be below 1"),
        (["--conversations-range-ratio", "1"], "conversations_range_ratio must be below 1"),
        (["--dataset-name", "conversations"], "conversations need --max-concurrency"),
        (
            ["--dataset-name", "conversations", "--max-concurrency", "2", "--request-rate", "3"],
            "a turn follows the answer before it: leave request_rate and find_max_rate out",
        ),
        (
            ["--dataset-name", "conversations", "--max-concurrency", "2", "--endpoint", "/v1/chat/completions"],
            "conversations are token ids: they need --endpoint /v1/completions",
        ),
        (["--request-rate", "0"], "request_rate must be inf or a number above 0, got '0'"),
        (["--request-rate", "fast"], "request_rate must be inf or a number above 0, got 'fast'"),
        (["--burstiness", "2"], "burstiness has no effect"),
        (["--find-max-rate", "ttft:100", "--request-rate", "3"], "leave request_rate out"),
        (["--find-max-rate", "ttft:100", "--repeat", "3"], "cannot be combined"),
        (["--find-seconds", "5"], "find_seconds needs find_max_rate"),
        (["--find-max-rate", "p99_tft:100"], "find_max_rate must be like p99_ttft:500"),
        (["--find-max-rate", "p101_ttft:100"], "find_max_rate must be like p99_ttft:500"),
        (["--goodput", "itl:5"], "goodput must be like ttft:500"),
        (["--goodput", "ttft"], "goodput must be like ttft:500"),
        (["--percentile-metrics", "ttft,speed"], "percentile_metrics must be of ttft,tpot,itl,e2el, got 'speed'"),
        (["--metric-percentiles", "50,101"], "metric_percentiles must be numbers from 0 to 100, got '101'"),
        (["--save-detailed"], "save_detailed needs --save-result"),
        (["--result-dir", "out"], "result_dir needs --save-result"),
        (["--metadata", "x"], "metadata must be KEY=VALUE, got 'x'"),
        (["--backend", "openai-chat"], "backend openai-chat needs --endpoint /v1/chat/completions"),
        (["--endpoint", "/v1/embeddings"], "endpoint must be a path that ends in /completions"),
        (["--base-url", "http://a", "--port", "9000"], "give one of them"),
        (["--base-url", "a:8000"], "base_url must be like http://127.0.0.1:8000"),
        (["--header", "x"], "header must be KEY=VALUE, got 'x'"),
        (["--extra-body", '{"stream": false}'], "extra_body must not hold 'stream'"),
        (["--max-concurrency", "0"], "--max-concurrency must be an integer at least 1, got '0'"),
    ],
)
def test_impossible_flags_are_refused_before_anything_runs(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve.main(words)
    assert message in str(caught.value)


def test_as_a_user_meets_it(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--base-url", stub.url("ok"), "--num-prompts", "3", "--disable-tqdm"]) == 0
    assert "Successful requests:                     3" in capsys.readouterr().out
    assert cli.main(["bench", "serve", "--burstiness", "2"]) == 1
    assert capsys.readouterr().err.startswith("quire bench: error: burstiness has no effect")
