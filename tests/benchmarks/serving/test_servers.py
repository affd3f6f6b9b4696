"""The comparison of servers: commands, figures, failures; and one real server of a tiny model under the client."""

import json
import random
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import model_shapes
from benchmarks.offline.engines import Job
from benchmarks.serving import servers
from benchmarks.serving.servers import Comparison, ServersFlags
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_model = runpy.run_path(str(ROOT / "tests" / "support" / "tiny_model.py"))["write_model"]
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def flags(**more: Any) -> ServersFlags:
    return ServersFlags(**{"engines": ("quire",), **more})


def test_commands() -> None:
    settings = {"dtype": "bfloat16", "enable_prefix_caching": False, "max_num_seqs": 8, "hf_overrides": {"a": 1}}
    for engine, module in (("quire", "quire"), ("vllm", "vllm.entrypoints.cli.main")):
        words = servers.server_command(Job(engine, "m", Path("/models/m"), settings, ()), 9000)
        assert module in words
        assert "/models/m" in words
        shown = " ".join(words)
        for part in ("--port 9000", "--served-model-name m", "--no-enable-prefix-caching", "--max-num-seqs 8"):
            assert part in shown
        assert words[-1] == '{"a": 1}'


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engines": ("transformers",)}, "engine 'transformers' must be one of quire, vllm"),
        ({"engine_args": {"quire": 1}}, "engine_args must be settings for each engine"),
        (
            {"offline": ("qiure",)},
            r"offline must be none or engines that run \(quire\), got 'qiure' \(did you mean quire",
        ),
        ({"offline": ("vllm",)}, "offline must be none or engines that run"),
        ({"offline": ("none", "quire")}, "offline must be none or engines that run"),
        ({"input_len": 4000, "output_len": 97}, "are more than max_model_len 4096"),
    ],
)
def test_impossible_flags(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flags(**given)


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize(
    ("words", "measured"),
    [
        ([], ["quire", "vllm"]),
        (["--offline", "quire"], ["quire"]),
        (["--offline", "vllm,quire"], ["quire", "vllm"]),
        (["--offline", "none"], []),
    ],
)
def test_offline_speed_is_measured_once_for_the_engines_named(
    words: list[str], measured: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(servers, "run_job", lambda job, *rest: jobs.append(job))
    monkeypatch.setattr(Comparison, "_serve", lambda self, job, number, scratch: None)
    words = [*words, "--models", str(model), "--rounds", "2", "--output-json", str(tmp_path / "result.json")]
    assert servers.main(words) == 0
    assert [job.engine for job in jobs] == measured


def test_the_table() -> None:
    def served(engine: str, speed: float) -> dict[str, Any]:
        run = {
            "output_throughput": speed,
            "p50_ttft_ms": 10.0,
            "p99_ttft_ms": 20.0,
            "mean_tpot_ms": 3.0,
            "client": {"cpu_share": 0.25},
        }
        return {"engine": engine, "model": "m", "startup_seconds": 5.0, **run, "runs": [run, run]}

    shown = servers.table(
        {
            "settings": {"num_prompts": 10, "max_concurrency": 4, "input_len": 6, "output_len": 20},
            "environment": {"cpu_cores": 2},
            "served": [served("quire", 150.0), served("vllm", 100.0)],
            "offline": [{"engine": "quire", "model": "m", "seconds": [1.0, 1.0, 9.0]}],
            "failures": ["it burnt"],
            "left_out": [],
        }
    )
    assert "| m | quire | 150 | 200 | **75.0%** | 10.0 | 20.0 | 3.0 | 5.0 | 25% |" in shown
    assert "| m | vllm | 100 | – | – | 10.0 | 20.0 | 3.0 | 5.0 | 25% |" in shown
    assert "m: quire is **1.50** times as fast as vllm" in shown
    assert "- it burnt" in shown


def test_the_table_of_caches_and_replicas() -> None:
    run: dict[str, Any] = {"output_throughput": 9.0, "p50_ttft_ms": 1.0, "p99_ttft_ms": 2.0, "mean_tpot_ms": 3.0}
    run |= {"client": {"cpu_share": 0.25}, "input_throughput": 1234.0}
    cached: dict[str, Any] = {"prefix_cache_hit_rate": 0.876, "busiest_engine": 1.05}
    rows = [
        {"engine": engine, "model": "m", "startup_seconds": 5.0, **run, **more}
        for engine, more in (("quire", cached), ("vllm", {}))
    ]
    settings: dict[str, Any] = {"num_prompts": 1, "max_concurrency": 1, "input_len": 1, "output_len": 1}
    settings["client_args"] = {"dataset_name": "conversations"}
    result = {"settings": settings, "environment": {"cpu_cores": 2}, "served": rows}
    shown = servers.table({**result, "offline": [], "failures": [], "left_out": []})
    assert shown.startswith("2 CPU cores · --dataset-name conversations\n")
    assert "| 25% | 1,234 | 87.6% | 1.05 x mean |" in shown
    assert "| 25% | 1,234 | – | – |" in shown


def test_the_clients_options(tmp_path: Path) -> None:
    given = flags(client_args={"dataset_name": "conversations", "num_warmups": 7})
    comparison = Comparison(given, tmp_path / "r.json", time.time())
    model_shapes.model_folder("llama-100m", tmp_path)
    job = Job("quire", "m", tmp_path / "llama-100m", {}, ())
    words = " ".join(comparison._client_command(job, 0, 9000, tmp_path / "serve.json"))
    assert "--dataset-name conversations" in words
    assert "--num-warmups 7" in words


@pytest.mark.usefixtures("known_machine", "quick_servers")
def test_a_real_server(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    words = ["--models", str(model), "--num-prompts", "8", "--max-concurrency", "4", "--input-len", "5"]
    words += ["--output-len", "4", "--rounds", "1", "--repeat", "2", "--output-json", str(path)]
    small = {"quire": {"num_gpu_blocks_override": 256, "device": "cpu"}}
    assert servers.main(["--engines", "quire", *words, "--offline", "none", "--engine-args", json.dumps(small)]) == 0
    result = json.loads(path.read_text())
    (row,) = result["served"]
    assert (row["completed"], row["failed"], row["num_runs"], row["num_prompts"]) == (16, 0, 2, 8)
    assert row["server"]["models"][0]["id"] == "tiny"
    assert "| tiny | quire |" in capsys.readouterr().out


def test_a_server_that_cannot_start(model: Path, tmp_path: Path) -> None:
    wanted = flags(models=(str(model),), num_prompts=2, rounds=1, engine_args={"quire": {"block_size": 3}})
    comparison = Comparison(wanted, tmp_path / "r.json", time.time() + 250)
    comparison._serve(comparison._job("quire", str(model), model, has_gpu=False), 0, tmp_path)
    (failure,) = comparison.results.failures
    assert failure.startswith("quire · tiny: the server ended with code 1: ")
    assert "--block-size must be a power of two, got 3" in failure
    assert failure.endswith((tmp_path / "r-quire-tiny-server.txt").read_text().strip().splitlines()[-1][:300])


def test_a_server_that_never_gets_ready(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]
    monkeypatch.setattr(servers, "server_command", lambda job, port: sleeper)
    wanted = flags(models=(str(model),), num_prompts=2, rounds=1, ready_timeout=1)
    comparison = Comparison(wanted, tmp_path / "r.json", float("inf"))
    comparison._serve(comparison._job("quire", str(model), model, has_gpu=False), 0, tmp_path)
    assert comparison.results.failures[0].startswith("quire · tiny: the server was not ready after 1 s")


def test_a_made_up_tokenizer_is_one(tmp_path: Path) -> None:
    folder = model_shapes.model_folder("llama-100m", tmp_path)
    model_shapes.add_tokenizer(folder)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == 16384
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界", add_special_tokens=False)) == "Grüße, 世界"
    words = [tokenizer.decode([i]) for i in range(256, 16384)]
    assert len(set(words)) == len(words)
    ids = random.Random(0).choices(range(256, 16384), k=20)
    assert len(tokenizer.decode(ids).split()) == 20
