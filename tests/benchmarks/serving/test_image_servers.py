"""The comparison of servers under requests with images: commands, ratios, failures, and one real server."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.model_shapes import add_tokenizer, model_folder
from benchmarks.processes import wait_until_ready
from benchmarks.serving import image_servers
from benchmarks.serving.image_servers import ImageServersFlags, medians, ratios, table
from engine.errors import ConfigError
from engine.models.families import read_spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = model_folder("qwen3-vl-tiny", tmp_path_factory.mktemp("models"))
    add_tokenizer(folder)
    return folder


def row(engine: str, load: str, speed: float, ttft: float) -> dict[str, Any]:
    runs = [{"request_throughput": speed * each, "p50_ttft_ms": ttft * each} for each in (0.5, 1, 2)]
    return {"engine": engine, "load": load, "round": 0, "p99_ttft_ms": 3 * ttft, "runs": runs}


ROWS = [
    row("quire", "text", 99.0, 10.0), row("quire", "unique", 24.0, 80.0), row("quire", "repeated", 60.0, 50.0),
    row("vllm", "text", 100.0, 20.0), row("vllm", "unique", 20.0, 100.0), row("vllm", "repeated", 80.0, 40.0),
]  # fmt: skip


def test_ratios_are_those_of_medians_beside_their_goals() -> None:
    assert medians(ROWS)["quire", "unique"] == {"requests/s": 24.0, "TTFT": 80.0}
    found = {each.name: (round(each.value, 3), each.is_met) for each in ratios(ROWS)}
    assert found == {
        "unique: requests/s of Quire ÷ vLLM": (1.2, True),
        "repeated: requests/s of Quire ÷ vLLM": (0.75, False),
        "unique: TTFT of Quire ÷ vLLM": (0.8, True),
        "repeated: TTFT of Quire ÷ vLLM": (1.25, False),
        "text: requests/s of Quire ÷ vLLM": (0.99, False),
        "repeated ÷ unique: requests/s of quire": (2.5, False),
        "repeated ÷ unique: requests/s of vllm": (4.0, True),
    }


def test_engines_that_did_not_run_have_no_ratio() -> None:
    assert [each.name for each in ratios(ROWS[:3])] == ["repeated ÷ unique: requests/s of quire"]
    assert ratios(ROWS[:1]) == []


def test_the_table_shows_figures_ratios_and_failures() -> None:
    settings = {"model": "m", "width": 1024, "height": 768, "max_concurrency": 64}
    found = [{"name": "a ÷ b", "value": 1.234, "goal": 1.15, "is_met": True}]
    result = {"environment": {"cpu_cores": 2}, "settings": settings, "rows": ROWS, "ratios": found, "failures": ["it"]}
    shown = table(result)
    assert "2 CPU cores · m · 1024 x 768 pixels · 64 at once" in shown
    assert "| vllm | unique | 20.00 | 100 | 300 |" in shown
    assert "a ÷ b: **1.23** (goal 1.15, met)" in shown
    assert shown.endswith("Failed: it")


def test_every_engine_gets_the_same_settings_and_loads() -> None:
    flags = ImageServersFlags(engines=("quire",), engine_args={"quire": {"seed": 5}})
    assert flags.settings_of("quire") == flags.settings_of("vllm") | {"seed": 5}
    text, unique, repeated = (flags.client_options(load, 0) for load in image_servers.LOADS)
    assert (text["dataset_name"], text["random_input_len"]) == ("random", 512)
    assert unique["random_mm_bucket_config"] == repeated["random_mm_bucket_config"] == "{(768, 1024, 1): 1}"
    assert "random_mm_num_distinct_items" not in unique
    assert repeated["random_mm_num_distinct_items"] == 8
    assert len({each["seed"] for each in (text, unique, repeated)}) == 3
    assert ImageServersFlags(engines=("quire",), loads=("repeated,text",)).loads == ("repeated", "text")
    with pytest.raises(ConfigError, match="loads must be text, unique, repeated, got 'uniq'"):
        ImageServersFlags(engines=("quire",), loads=("uniq",))
    with pytest.raises(ConfigError, match="engine 'transformers' must be one of quire, vllm"):
        ImageServersFlags(engines=("transformers",))


def test_the_folder_is_one_that_transformers_reads(folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    vision = read_spec(folder).vision
    assert vision is not None
    ids = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"])
    assert tuple(ids[:3]) == vision.placeholder
    assert (config.image_token_id, config.video_token_id) == (ids[1], ids[3])
    parts = [{"type": "image"}, {"type": "text", "text": "x \x01y"}]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": parts}], return_dict=False)
    assert [token for token in prompt if token >= 151643] == ids[:3]
    assert len(prompt) == len("user:") + 3 + len("x \x01y")  # a token for each character
    picture = Image.fromarray(np.zeros((768, 1024, 3), np.uint8))
    found = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[picture], return_tensors="pt")
    assert found["image_grid_thw"].tolist() == [[1, 48, 64]]


@pytest.mark.usefixtures("known_machine", "quick_servers")
def test_a_real_server(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = ["--engines", "quire", "--model", str(folder), "--num-prompts", "4", "--max-concurrency", "2"]
    words += ["--height", "64", "--width", "96", "--num-distinct", "1", "--text-len", "8", "--output-len", "3"]
    words += ["--repeat", "1", "--max-model-len", "512", "--output-json", str(path)]
    small = {"quire": {"num_gpu_blocks_override": 256, "device": "cpu"}}
    assert image_servers.main([*words, "--engine-args", json.dumps(small)]) == 0
    result = json.loads(path.read_text())
    assert [each["load"] for each in result["rows"]] == ["text", "unique", "repeated"]
    assert [each["failed"] for each in result["rows"]] == [0, 0, 0]
    lengths = [each["total_input_tokens"] for each in result["rows"]]
    assert lengths[1] == lengths[2]
    assert lengths[1] - lengths[0] == 4 * (24 + 2 + 70)  # 70 tokens of an image of 65,536 pixels or more, two around it
    assert [each["name"] for each in result["ratios"]] == ["repeated ÷ unique: requests/s of quire"]


@pytest.mark.usefixtures("known_machine")
def test_a_server_that_cannot_start_is_a_failure(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--engines", "quire", "--model", str(folder), "--output-json", str(tmp_path / "r.json")]
    assert image_servers.main([*words, "--engine-args", '{"quire": {"block_size": 3}}']) == 1
    shown = capsys.readouterr()
    assert "Failed: quire did not start: " in shown.out
    assert "--block-size must be a power of two, got 3" in shown.err


@pytest.mark.usefixtures("known_machine", "quick_servers")
def test_a_time_limit_ends_the_comparison(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The limit counts from the start; the load that it cuts has no row, and later ones are not begun."""
    path = tmp_path / "r.json"
    flags = ImageServersFlags(
        engines=("quire",), model=str(folder), num_prompts=1_000, max_model_len=512, output_len=3, loads=("repeated",),
        engine_args={"quire": {"num_gpu_blocks_override": 256, "device": "cpu"}},
    )  # fmt: skip
    comparison = image_servers.ImageComparison(flags, path, float("inf"))

    def over_once_ready(*given: Any) -> bool:
        found = wait_until_ready(*given)
        comparison.deadline = 0.0
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_servers, "wait_until_ready", over_once_ready)
        result = comparison.run()
    assert result["rows"] == []
    assert result["failures"] == ["quire · repeated: the time was over"]
    assert json.loads(path.read_text())["failures"] == result["failures"]
