"""`quire top`: what it makes of a server's metrics, and how it shows them."""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from benchmarks.processes import free_port
from server.cli import main as cli
from server.cli.top_view.metrics import KeyRow, Reading, busiest, compare, quantile
from server.cli.top_view.view import line, screen
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live

READY = {"phase": "ready", "fraction": None, "seconds_left": None, "num_restarts": 0}
BEFORE = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="toy"} 1
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="toy"} 100
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="toy"} 900
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1"} 7
vllm:time_to_first_token_seconds_bucket{le="1.0"} 7
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 7
# TYPE quire:key_requests counter
quire:key_requests_total{key="alice"} 1
# TYPE quire:key_generation_tokens counter
quire:key_generation_tokens_total{key="alice"} 10
"""
NOW = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="toy"} 3
vllm:num_requests_running{engine="1",model_name="toy"} 2
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="toy"} 4
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="toy"} 0.25
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="toy"} 300
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="toy"} 50
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1"} 7
vllm:time_to_first_token_seconds_bucket{le="1.0"} 9
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 9
# TYPE quire:key_requests counter
quire:key_requests_total{key="alice"} 5
quire:key_requests_total{key="bob"} 2
# TYPE quire:key_requests_running gauge
quire:key_requests_running{key="bob"} 2
# TYPE quire:key_generation_tokens counter
quire:key_generation_tokens_total{key="alice"} 30
quire:key_generation_tokens_total{key="bob"} 8
# TYPE quire:process_open_fds gauge
quire:process_open_fds{process="api"} 12
# TYPE quire:process_resident_memory_bytes gauge
quire:process_resident_memory_bytes{process="api"} 104857600
"""


def test_rates_and_times_are_those_between_two_readings() -> None:
    snapshot = compare(Reading(BEFORE, READY, 10.0), Reading(NOW, READY, 12.0))
    assert (snapshot.model, snapshot.running, snapshot.waiting, snapshot.kv_cache) == ("toy", 5, 4, 0.25)
    assert snapshot.generated_tokens == 100
    assert snapshot.prompt_tokens == 25, "the counter began anew"
    assert snapshot.first_token[0] == pytest.approx(0.55), "only what is new counts"
    assert math.isnan(snapshot.between_tokens[0])
    alice, bob = snapshot.keys
    assert (alice.name, alice.requests, alice.generated_tokens) == ("alice", 2, 10)
    assert (bob.name, bob.running, bob.requests, bob.generated_tokens) == ("bob", 2, 1, 4)
    (api,) = snapshot.processes
    assert (api.name, api.memory, api.files) == ("api", 100 * 2**20, 12)


def test_quantiles() -> None:
    buckets = {1.0: 0.0, 2.0: 4.0, 4.0: 8.0, math.inf: 10.0}
    assert [quantile(buckets, f) for f in (0.2, 0.4, 0.6, 0.99)] == [1.5, 2.0, 3.0, 4.0]
    assert math.isnan(quantile({}, 0.5))
    assert math.isnan(quantile({1.0: 0.0, math.inf: 0.0}, 0.5))


def test_the_busiest_keys_come_first() -> None:
    rows = [KeyRow("a", 0, 0, 0, 1), KeyRow("b", 5, 0, 0, 0), KeyRow("c", 0, 0, 9, 0), KeyRow("d", 0, 0, 0, 0)]
    assert [row.name for row in busiest(rows, 3)] == ["c", "a", "b"]


def shown(before: str, now: str, state: dict[str, Any]) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(screen(compare(Reading(before, READY, 0.0), Reading(now, state, 1.0)), "http://here"))
    return console.export_text()


def test_the_screen_shows_keys_processes_and_how_far_a_start_is() -> None:
    text = shown(BEFORE, NOW, READY)
    for words in ("toy", "ready", "alice", "bob", "25%", "200 tok/s", "100 MiB"):
        assert words in text
    text = shown("", "", READY | {"phase": "loading", "fraction": 0.5, "seconds_left": 12.0, "num_restarts": 2})
    for words in ("no model yet", "loading 50%, about 12 s left", "2 restarts"):
        assert words in text


def test_lines_where_there_is_no_terminal(serve: Callable[..., Live], capsys: pytest.CaptureFixture[str]) -> None:
    live = serve(FakeEngine(), ServerConfig(api_key=("k",)))
    url = f"http://127.0.0.1:{live.port}"
    assert cli.main(["top", url, "--api-key", "k", "--interval", "0.1", "--count", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(" ready · running 0 " in line for line in lines)
    assert cli.main(["top", url, "--api-key", "k", "--interval", "0.1", "--once"]) == 0
    once = capsys.readouterr().out
    assert "quire top" in once
    assert "ready" in once
    assert "\x1b" not in once
    assert cli.main(["top", url]) == 1
    assert "requires an API key: --api-key KEY" in capsys.readouterr().err


def test_no_server_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "no server answers at" in capsys.readouterr().err


def test_a_line_of_a_server_that_is_gone() -> None:
    gone = compare(Reading(NOW, READY, 0.0), Reading("", {"phase": "no answer"}, 1.0))
    assert line(gone).startswith("no answer · running 0 · waiting 0 · KV 0% · prompt 0 tok/s · generated 0 tok/s")
