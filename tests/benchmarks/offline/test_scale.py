"""Speed-up and efficiency: what is run, and what is made of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.offline import engines, scale
from engine.errors import ConfigError


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs, recorded instead of started."""
    seen: list[dict[str, Any]] = []

    def run(
        job: engines.Job, number: int, flags: Any, deadline: float, scratch: Path, results: engines.Results
    ) -> None:
        size = max(job.settings.get(setting, 1) for _, setting in scale.PARALLEL.values())
        seen.append({"program": job.program, **job.settings})
        ready = {"event": "ready", "version": "1", "init_seconds": 1.0, "import_seconds": 1.0, "process_seconds": 2.0}
        seconds = 12.0 if size == 1 else 12.0 / size * 1.25
        done = {"event": "run", "work": "2x3x4", "num_output_tokens": 8, "seconds": seconds}
        results.take(job, number, [ready, done])

    monkeypatch.setattr(engines, "run_job", run)
    monkeypatch.setattr(engines, "describe_machine", lambda *_: {"cpu_cores": 2, "torch": "2"})
    for module in (engines, scale):
        monkeypatch.setattr(module, "nvidia_smi", lambda name: None)
    return seen


def test_each_layout_runs_the_same_work_and_is_compared_with_one_gpu(
    tmp_path: Path, seen: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scale.json"
    words = ["--model", "qwen3-0.6b", "--gpus", "4,1", "--work", "2x3x4", "--rounds", "1"]
    assert scale.main([*words, "--models-dir", str(tmp_path), "--output-json", str(path)]) == 0
    assert [(each["program"], each.get("tensor_parallel_size"), each.get("data_parallel_size")) for each in seen] == [
        ("quire", 1, None), ("quire", 4, None), ("quire-replicas", None, 1), ("quire-replicas", None, 4),
    ]  # fmt: skip
    result = json.loads(path.read_text())
    assert [(row["parallel"], row["gpus"], row["speed_up"]) for row in result["runs"]] == [
        ("tensor", 1, 1.0), ("tensor", 4, pytest.approx(3.2)), ("data", 1, 1.0), ("data", 4, pytest.approx(3.2)),
    ]  # fmt: skip
    assert "| tensor | 2x3x4 | 2 requests, 3 in, 4 out | 4 | 2 | 3.20 | 80% |" in capsys.readouterr().out


def test_ranks_and_stages_share_their_run_on_one_gpu(tmp_path: Path, seen: list[dict[str, Any]]) -> None:
    path = tmp_path / "scale.json"
    words = ["--model", "qwen3-0.6b", "--gpus", "1,2", "--parallel", "pipeline,tensor", "--work", "2x3x4"]
    words += ["--rounds", "1"]
    assert scale.main([*words, "--models-dir", str(tmp_path), "--output-json", str(path)]) == 0
    assert [(each.get("pipeline_parallel_size"), each.get("tensor_parallel_size")) for each in seen] == [
        (1, None), (2, None), (None, 2),
    ]  # fmt: skip
    runs = json.loads(path.read_text())["runs"]
    assert [(row["engine"], row["parallel"], row["gpus"], row["speed_up"]) for row in runs] == [
        ("pipeline 1", "pipeline", 1, 1.0), ("pipeline 2", "pipeline", 2, pytest.approx(1.6)),
        ("tensor 1", "tensor", 1, 1.0), ("tensor 2", "tensor", 2, pytest.approx(1.6)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "2,4"], "gpus must be numbers, 1 among them"),
        (["--parallel", "expert"], "parallel must be of tensor, pipeline, data"),
        (["--work", "prefix"], "work prefix needs one engine"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scale.main(words)


def test_fewer_gpus_than_asked_for_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "nvidia_smi", lambda name: ["NVIDIA H200"] * 2)
    with pytest.raises(ConfigError, match="4 are asked for, and this machine has 2"):
        scale.main([])
