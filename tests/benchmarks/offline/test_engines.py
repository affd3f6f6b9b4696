"""The comparison of engines: what is run, in which order, within which time; and one real comparison of a tiny
model.
"""

import dataclasses
import json
import runpy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.offline import engines, latency, one_engine
from benchmarks.offline.engines import EnginesFlags, Job, Results
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_model = runpy.run_path(str(ROOT / "tests" / "support" / "tiny_model.py"))["write_model"]
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def flags(**more: Any) -> EnginesFlags:
    return EnginesFlags(**{"engines": ("quire", "transformers"), **more})


def test_names_may_be_separated_by_commas() -> None:
    found = flags(engines=("quire,transformers",), work=("nano,decode", "1x2x3"), models=("qwen3-0.6b,llama-3.1-8b",))
    assert found.engines == ("quire", "transformers")
    assert found.work == ("nano", "decode", "1x2x3")
    assert found.models == ("qwen3-0.6b", "llama-3.1-8b")
    assert found.baseline == "transformers"
    assert flags().work == ("latency1", "latency8", "nano")


def test_weights_are_written_for_shapes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(engines, "write_random_weights", lambda folder, counts: written.append(folder))
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text('{"vocab_size": 1000}', encoding="utf-8")
    wanted = flags(
        models=("qwen3-0.6b", str(own)), work=("1x2x3",), models_dir=str(tmp_path / "shapes"), write_weights=True
    )
    pairs = engines.plan(wanted, has_gpu=True)
    assert written == [tmp_path / "shapes" / "qwen3-0.6b"]
    assert {job.settings["load_format"] for pair in pairs for job in pair} == {"auto"}


def test_edits_have_weights_that_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Path, bool]] = []
    monkeypatch.setattr(engines, "write_random_weights", lambda folder, counts: written.append((folder, counts)))
    wanted = {"models": ("qwen3-0.6b",), "work": ("latency1", "edit1"), "models_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="give --write-weights"):
        engines.plan(flags(**wanted), has_gpu=True)
    plain, counting = engines.plan(flags(**wanted, write_weights=True), has_gpu=True)
    assert written == [(plain[0].folder, False), (counting[0].folder, True)]
    assert counting[0].folder == tmp_path / "counting" / "qwen3-0.6b"
    assert not json.loads((counting[0].folder / "config.json").read_text())["tie_word_embeddings"]
    assert plain[0].compared
    assert not counting[0].compared


def test_embeddings_are_work_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.MODULES, "vllm", "engine")  # as if it were installed
    wanted = {"models": ("bge-large",), "work": ("embed",), "models_dir": str(tmp_path)}
    (pair,) = engines.plan(flags(**wanted, engines=("quire", "vllm")), has_gpu=True)
    assert [job.settings.get("runner") for job in pair] == [None, "pooling"]
    assert [job.settings["skip_tokenizer_init"] for job in pair] == [True, False], "vLLM embeds with a tokenizer only"
    assert Tokenizer.from_folder(pair[1].folder).decode([30_000])
    assert {job.settings["max_model_len"] for job in pair} == {512}
    with pytest.raises(ConfigError, match="embeddings is for quire and vllm alone, not transformers"):
        engines.plan(flags(**wanted), has_gpu=True)


def test_work_is_grouped_by_what_an_engine_must_be_started_with(tmp_path: Path) -> None:
    wanted = flags(models=("qwen3-0.6b",), work=("nano", "prefix", "longctx", "decode"), models_dir=str(tmp_path))
    pairs = engines.plan(wanted, has_gpu=True)
    assert [[work.name for work in pair[0].works] for pair in pairs] == [["nano", "decode"], ["prefix"], ["longctx"]]
    for pair in pairs:
        assert [job.engine for job in pair] == ["quire", "transformers"]
        assert pair[0].settings == pair[1].settings
    settings = [pair[0].settings for pair in pairs]
    assert [(s["max_model_len"], s["enable_prefix_caching"]) for s in settings] == [
        (4096, False),
        (4096, True),
        (32768, False),
    ]
    assert settings[0] | {"max_model_len": 0} == {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 0,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
    }
    assert engines.plan(wanted, has_gpu=False)[0][0].settings["dtype"] == "float32"
    more = dataclasses.replace(wanted, engine_args={"quire": {"max_num_seqs": 7}})
    assert [job.settings.get("max_num_seqs") for job in engines.plan(more, has_gpu=True)[0]] == [7, None]


def test_engines_take_turns(tmp_path: Path) -> None:
    pairs = engines.plan(flags(work=("nano", "prefix"), models_dir=str(tmp_path)), has_gpu=True)
    order = [(number, job.engine) for number, pair in engines.schedule(pairs, 3) for job in pair]
    assert order == [
        (number, engine)
        for number, engines in enumerate(
            (("quire", "transformers"), ("transformers", "quire"), ("quire", "transformers"))
        )
        for _ in pairs
        for engine in engines
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engines": ("sglang",)}, "engine 'sglang' must be one of quire, vllm"),
        ({"engine_args": {"vlm": {}}}, "did you mean vllm"),
        ({"engine_args": {"quire": 3}}, "engine_args must be settings for each engine"),
        (
            {"engines": ("quire",), "baseline": "transformers"},
            "baseline transformers must be one of the engines that run",
        ),
        ({"rounds": 0}, "rounds must be an integer at least 1"),
    ],
)
def test_impossible_flags(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flags(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"work": ("1x5000x5",), "max_model_len": 4096}, "needs 5,005 tokens of context, qwen3-0.6b runs with 4,096"),
        ({"work": ("fast",)}, "workload 'fast' is neither"),
        ({"models": ("gpt-5",)}, "model 'gpt-5' is neither"),
    ],
)
def test_impossible_work(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        engines.plan(flags(**given, models_dir=str(tmp_path)), has_gpu=True)


def made_up_results(tmp_path: Path) -> tuple[EnginesFlags, Results]:
    wanted = flags(work=("2x8x4", "2x8x1"), models=("llama-100m",), models_dir=str(tmp_path))
    ((quire, other),) = engines.plan(wanted, has_gpu=False)
    results = Results()

    def ready(seconds: float) -> dict[str, Any]:
        times = {"import_seconds": 1.0, "init_seconds": seconds, "process_seconds": seconds + 2}
        return {"event": "ready", "version": "1.0", **times}

    def run(work: str, seconds: float, tokens: int) -> dict[str, Any]:
        return {"event": "run", "work": work, "seconds": seconds, "num_output_tokens": tokens}

    assert results.take(quire, 0, [ready(2.0), run("2x8x4", 1.0, 8), run("2x8x4", 3.0, 8), run("2x8x1", 1.0, 2)])
    assert results.take(other, 0, [ready(8.0), run("2x8x4", 4.0, 8)])
    assert results.take(quire, 1, [ready(4.0), run("2x8x4", 2.0, 8)]) == ["2x8x4"]
    assert results.take(other, 1, [ready(10.0), run("2x8x4", 6.0, 7)]) == []
    return wanted, results


def test_ratios_are_of_medians(tmp_path: Path) -> None:
    wanted, results = made_up_results(tmp_path)
    result = engines.summary(wanted, results, {"cpu_cores": 2, "torch": "2"})
    rows = {(row["engine"], row["work"]): row for row in result["runs"]}
    row = rows["quire", "2x8x4"]
    assert (row["median_seconds"], row["best_seconds"], row["rounds"]) == (2.0, 1.0, [0, 0, 1])
    assert (row["num_prompt_tokens"], row["num_output_tokens"]) == (16, 8)
    assert (row["output_tokens_per_second"], row["tokens_per_second"], row["ratio"]) == (4.0, 12.0, 2.0)
    assert rows["quire", "2x8x1"]["ratio"] is None
    assert result["starts"][0]["ratio"] == 3.0
    assert result["failures"] == ["transformers · llama-100m · 2x8x4: made 7 tokens instead of 8"]
    shown = engines.table(result)
    assert (
        "| 2x8x4 | 2 requests, 8 in, 4 out | 4 tok/s (3 runs, 100% apart) | 2 tok/s (1 runs, 0% apart) | **2.00** |"
        in shown
    )
    assert "| 2x8x1 | 2 requests, 8 in, 1 out | 18 tok/s (1 runs, 0% apart) | – | – |" in shown
    assert "| start-up | constructor until ready, s | 2.0 4.0 | 8.0 10.0 | 3.00 |" in shown
    assert "made 7 tokens instead of 8" in shown


def test_a_real_comparison(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    words = ["--engines", "quire", "--models", str(model), "--work", "2x8x4,1x5x1", "--rounds", "2", "--repeat", "2"]
    small = {"num_gpu_blocks_override": 256, "max_num_batched_tokens": 64, "device": "cpu"}
    assert engines.main([*words, "--output-json", str(path), "--engine-args", json.dumps({"quire": small})]) == 0
    result = json.loads(path.read_text())
    assert [(row["work"], len(row["seconds"])) for row in result["runs"]] == [("2x8x4", 4), ("1x5x1", 4)]
    assert len(result["starts"][0]["init_seconds"]) == 2
    assert result["environment"]["torch"]
    assert path.with_suffix(".md").read_text().strip() in capsys.readouterr().out


OTHER = """
from types import SimpleNamespace

__version__ = "before"


class SamplingParams:
    def __init__(self, **fields):
        self.max_tokens = fields["max_tokens"]


class LLM:
    def __init__(self, **settings): ...
    def generate(self, prompts, params, use_tqdm):
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * p.max_tokens)]) for p in params]
"""


@pytest.mark.usefixtures("known_machine")
def test_another_checkout_is_an_engine(model: Path, tmp_path: Path) -> None:
    before = tmp_path / "before"
    (before / "engine").mkdir(parents=True)
    (before / "engine" / "__init__.py").write_text(OTHER)
    path, name = tmp_path / "result.json", f"quire@{before}"
    words = ["--engines", name, "--models", str(model), "--work", "1x5x2", "--rounds", "1", "--repeat", "1"]
    assert engines.main([*words, "--output-json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [(row["engine"], row["version"]) for row in result["starts"]] == [(name, "before")]
    with pytest.raises(ConfigError, match="holds no checkout of Quire"):
        flags(engines=(f"quire@{tmp_path}",))


@pytest.mark.slow
def test_engines_that_compute_something_else_are_not_compared_silently(model: Path, tmp_path: Path) -> None:
    before = tmp_path / "before"
    (before / "engine").mkdir(parents=True)
    (before / "engine" / "__init__.py").write_text(OTHER.replace("[0]", "[-1]"))
    path, other = tmp_path / "result.json", f"quire@{before}"
    small = {"load_format": "auto", "num_gpu_blocks_override": 256, "max_num_batched_tokens": 64, "device": "cpu"}
    words = ["--engines", f"{other},quire", "--baseline", "quire", "--models", str(model), "--work", "1x5x2"]
    words += ["--rounds", "1", "--repeat", "1", "--engine-args", json.dumps({"quire": small, other: small})]
    assert engines.main([*words, "--output-json", str(path)]) == 1
    result = json.loads(path.read_text())
    assert {row["engine"]: row["equal_greedy"] for row in result["starts"]} == {other: 0.0, "quire": 1.0}
    (failure,) = result["failures"]
    assert failure.startswith(f"{other} · tiny: 0% of the first greedy tokens are those of quire")
    assert "| first greedy tokens that are quire's | 0% | 100% |" in path.with_suffix(".md").read_text()


def test_an_engine_that_cannot_start(model: Path, tmp_path: Path) -> None:
    wanted = flags(engines=("quire",), models=(str(model),), work=("1x5x1",), engine_args={"quire": {"block_size": 3}})
    ((job,),) = engines.plan(wanted, has_gpu=False)
    results = Results()
    engines.run_job(job, 0, wanted, time.time() + 250, tmp_path, results)
    (failure,) = results.failures
    assert "ended with code 1 (at start-up): " in failure
    assert "block_size must be a power of two, got 3" in failure


def test_time_over(model: Path, tmp_path: Path) -> None:
    wanted = flags(engines=("quire",), models=(str(model),), work=("1x5x1",))
    ((job,),) = engines.plan(wanted, has_gpu=False)
    results = Results()
    begin = time.time()
    engines.run_job(job, 0, wanted, begin + 0.05, tmp_path, results)
    assert results.failures == []
    assert results.left_out == ["round 1: quire · tiny · 1x5x1: the time was over (1x5x1)"]
    engines.run_job(job, 1, wanted, begin, tmp_path, results)
    assert results.left_out[1] == "round 2: quire · tiny · 1x5x1"


def test_a_job_is_what_the_engine_gets(model: Path) -> None:
    job = Job("quire", "m", model, {"a": 1}, ())
    assert job.key == "quire · m · "


def test_latency(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latency.json"
    small = ["--device", "cpu", "--num-gpu-blocks-override", "256", "--num-iters", "3", "--num-iters-warmup", "1"]
    words = ["--model", str(model), "--batch-size", "2", "--input-len", "4", "--output-len", "3", *small]
    assert latency.main([*words, "--output-json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 3
    assert result["percentiles"].keys() == {"10", "25", "50", "75", "90", "99"}
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    assert result["engine_settings"]["enable_prefix_caching"] is False
    shown = capsys.readouterr().out
    assert "Avg latency: " in shown
    assert "99% percentile latency: " in shown
    with pytest.raises(ConfigError, match="are more than the context holds, 4096"):
        latency.main([*words, "--input-len", "4094"])


VLLM = """
import json, os
from types import SimpleNamespace

__version__ = "made up"
SamplingParams = SimpleNamespace

class LLM:
    def __init__(self, **settings):
        self.settings = settings
    def generate(self, prompts, params, use_tqdm, lora_request=None):
        used = [(each.lora_name, each.lora_int_id, each.lora_path) for each in lora_request or ()]
        with open(os.environ["SEEN"], "a") as file:
            file.write(json.dumps([self.settings.get("max_loras"), used]) + chr(10))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * p.max_tokens)]) for p in params]
"""


@pytest.mark.usefixtures("known_machine")
def test_the_same_adapters_on_quire_and_vllm(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm" / "lora").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM)
    request = "import collections\nLoRARequest = collections.namedtuple('L', 'lora_name lora_int_id lora_path')\n"
    (tmp_path / "vllm" / "lora" / "request.py").write_text(request)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    path, small = tmp_path / "result.json", {"num_gpu_blocks_override": 256, "device": "cpu"}
    words = ["--engines", "quire,vllm", "--models", str(model), "--work", "3x5x2,3x5x2+2", "--rounds", "1"]
    words += ["--repeat", "1", "--engine-args", json.dumps({"quire": small}), "--output-json", str(path)]
    assert engines.main(words) == 0
    rows = json.loads(path.read_text())["runs"]
    assert {(row["engine"], row["work"]) for row in rows} == {
        (engine, work) for engine in ("quire", "vllm") for work in ("3x5x2", "3x5x2+2")
    }
    assert {row["what"] for row in rows if "+" in row["work"]} == {"3 requests, 5 in, 2 out, 2 LoRA adapters"}
    folders = [str(model / "adapters" / f"rank-16-{index}") for index in range(2)]
    used = [[Path(folders[index]).name, index + 1, folders[index]] for index in (0, 1, 0)]
    assert [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()] == [
        [None, []], [None, []], [2, used], [2, used],
    ]  # fmt: skip
    config = json.loads((Path(folders[0]) / "adapter_config.json").read_text())
    assert {"q_proj", "down_proj"} <= set(config["target_modules"])


def test_other_engines_have_no_adapters(model: Path) -> None:
    with pytest.raises(ConfigError, match="for quire and vllm alone, not transformers"):
        engines.plan(flags(models=(str(model),), work=("1x2x3+1",)), has_gpu=False)


def test_prompts_without_answers_are_embedded() -> None:
    engine, calls = one_engine.LLMEngine.__new__(one_engine.LLMEngine), list[Any]()
    engine._llm = SimpleNamespace(embed=lambda prompts, use_tqdm: calls.append(prompts))
    assert engine.generate([[1, 2], [3]], [0, 0]) == 0
    assert calls == [[{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]]
