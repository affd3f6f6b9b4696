"""`quire plan`: what it prints is what the plan says, and the command that it ends with would run."""

import json
import shlex
from pathlib import Path

import pytest

from benchmarks.model_shapes import model_folder
from engine.config import EngineConfig
from engine.flags import Parser, add_flags
from engine.setup.gpu_specs import GPUS
from engine.setup.plan import make_plan
from server.cli.main import main

Capture = pytest.CaptureFixture[str]


def test_a_model_on_a_gpu(tmp_path: Path, capsys: Capture) -> None:
    model = str(model_folder("qwen3-32b", tmp_path))
    assert main(["plan", model, "--gpu", "l40s", "--max-num-seqs", "64", "--no-enable-prefix-caching"]) == 1
    shown = capsys.readouterr().out
    assert "32.76 billion parameters · 64 layers · bfloat16" in shown
    assert "no room: the engine would not start" in shown
    command = shown.rstrip().splitlines()[-1].partition("Start it:  ")[2]
    assert command == f"quire serve {model} --max-num-seqs 64 --no-enable-prefix-caching --quantization fp8"
    parser = Parser()
    add_flags(parser, EngineConfig)
    parser.parse_args(shlex.split(command)[3:])
    overrides = '{"max_position_embeddings": 8000}'
    assert main(["plan", model, "--gpu", "l40s", "-q", "fp8", "--hf-overrides", overrides]) == 0
    fitting = capsys.readouterr().out
    assert "context 8,000" in fitting
    assert fitting.rstrip().endswith(f"quire serve {model} --hf-overrides '{overrides}' --quantization fp8")


def test_slots_of_adapters(tmp_path: Path, capsys: Capture) -> None:
    model = str(model_folder("llama-3.1-8b", tmp_path))
    assert main(["plan", model, "--gpu", "h200", "--enable-lora", "--max-loras", "8"]) == 0
    assert "8 × 90.5 MiB: up to rank 16" in capsys.readouterr().out


def test_as_json(tmp_path: Path, capsys: Capture) -> None:
    model = str(model_folder("llama-3.1-8b", tmp_path))
    assert main(["plan", "--model", model, "--gpu", "h200", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    plan = make_plan(EngineConfig(model=model), GPUS["h200"])
    assert shown["kv_cache_bytes"] == plan.kv_cache_bytes
    assert shown["max_model_len"] == 131072
    assert list(shown["requests_at_once"]) == ["1024", "8192", "32768", "131072"]
    assert shown["tokens_per_second_at_most"]["1024"]["1"] == round(plan.tokens_per_second(1, 1024), 1)


def test_without_a_gpu_all_are_shown(capsys: Capture) -> None:
    assert main(["plan"]) == 0
    captured = capsys.readouterr()
    assert "No model given" in captured.err
    rows = captured.out.split("On each device")[1].splitlines()[1 : len(GPUS) + 2]
    assert rows[0].startswith("  this machine's CPU, "), "it comes first"
    assert [row.startswith(f"  1 × {gpu.title} ") for row, gpu in zip(rows[1:], GPUS.values(), strict=True)]


def test_the_cpu_of_this_machine(tiny_model: Path, capsys: Capture) -> None:
    assert main(["plan", str(tiny_model), "--gpu", "cpu"]) == 0
    shown = capsys.readouterr().out
    for words in ("this machine's CPU, ", " is free\n", "--quantization int8", "Maximum tokens per second"):
        assert words in shown
    assert "tensor-parallel" not in shown
    assert main(["plan", str(tiny_model), "--gpu", "cpu", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["num_gpus"] == 0
    assert 0 < plan["kv_cache_bytes"] <= 4 << 30
    assert plan["tokens_per_second_at_most"]["1024"]["1"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "--gpu", "h300"], "--gpu must be cpu, one of b200, "),
        (["plan", "--gpu", "a100", "--kv-cache-dtype", "fp8"], "needs compute capability 8.9"),
        (["plan", "/nowhere", "--gpu", "a100"], "there is no such folder"),
        (["plan", "/nowhere"], "there is no such folder"),
        (["plan", "-q", "awq"], "quantization must be"),
        (["plan", "--gpu", "a100", "--tensor-parallel-size", "3"], "cannot be divided among 3 ranks"),
    ],
)
def test_errors_are_one_line(words: list[str], message: str, capsys: Capture) -> None:
    assert main(words) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]
