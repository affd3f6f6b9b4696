"""The e4m3 KV cache through the whole engine on the CPU: what it holds, what it costs, where its scales come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.core.params.sampling import SamplingParams
from engine.errors import ConfigError
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.offline.llm import LLM
from engine.setup.options import runner_options
from engine.worker.kv_cache import KVCacheLayout, e4m3_scales
from engine.worker.model_runner import ModelRunner
from engine.worker.startup import build_runner

PROMPTS = [[(i * 31 + k * k * 7) % 250 for k in range(n)] for i, n in enumerate((1, 15, 16, 17, 90, 33, 90))]
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
LARGE = 2000.0
SMALL = 0.35  # mean error of a log-probability; saturated caches miss by 2


def scores(model: Path, **settings: Any) -> torch.Tensor:
    """Log-probabilities of every prompt token but the first ones."""
    llm = LLM(model=str(model), device="cpu", max_model_len=256, **settings)
    found = []
    for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, SCORED, use_tqdm=False), strict=True):
        assert result.prompt_logprobs is not None
        for token, at in zip(prompt[1:], result.prompt_logprobs[1:], strict=True):
            assert at is not None
            found.append(at[token].logprob)
    llm.close()
    return torch.tensor(found)


@pytest.fixture(scope="module")
def exact(tiny_model: Path) -> torch.Tensor:
    return scores(tiny_model)


def test_the_error_is_small(tiny_model: Path, exact: torch.Tensor) -> None:
    """0.24 on average for this model of random weights, whose log-probabilities have a spread of 2.3; bfloat16 costs it
    0.05.
    """
    error = (scores(tiny_model, kv_cache_dtype="fp8") - exact).abs()
    assert 0.01 < error.mean() < SMALL


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 16}, {"num_gpu_blocks_override": 17}, {"enable_prefix_caching": False}],
    ids=["chunked", "little memory", "no prefix cache"],
)
def test_it_is_the_same_cache_however_it_is_filled(tiny_model: Path, settings: dict[str, Any]) -> None:
    whole = scores(tiny_model, kv_cache_dtype="fp8_e4m3")
    assert (scores(tiny_model, kv_cache_dtype="fp8", **settings) - whole).abs().mean() < 0.02


def test_the_same_memory_holds_more(tiny_model: Path) -> None:
    spec = read_spec(tiny_model)
    bfloat16, e4m3 = (
        KVCacheLayout.of([0] * spec.num_layers, 2, 16, 16, dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    )
    assert bfloat16.block_bytes == 2 * e4m3.block_bytes
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 2**20, "max_model_len": 64}
    assert (
        build(tiny_model, **settings).num_blocks * 4 == build(tiny_model, kv_cache_dtype="fp8", **settings).num_blocks
    )


def build(model: Path, **settings: Any) -> ModelRunner:
    config = EngineConfig(model=str(model), device="cpu", **({"max_model_len": 256} | settings))
    spec = read_spec(model)
    return build_runner(model, spec, runner_options(config, spec, offline=True))


@pytest.fixture
def large(tmp_path: Path, make_model: Any) -> Path:
    """The tiny model with values two thousand times as large, which its output projections take back."""
    folder = make_model(tmp_path / "large")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        factor = LARGE if "v_proj" in name else 1 / LARGE if "o_proj" in name else 1
        tensors[name] = tensors[name] * factor
    save_file(tensors, folder / "model.safetensors")
    return folder


def add_scales(folder: Path, scales: dict[str, torch.Tensor]) -> None:
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors")


def test_what_does_not_fit_saturates(large: Path, exact: torch.Tensor) -> None:
    error = (scores(large, kv_cache_dtype="fp8") - exact).abs().mean()
    assert torch.isfinite(error)
    assert error > 2 * SMALL


def test_scales_from_random_tokens(large: Path, exact: torch.Tensor) -> None:
    assert (scores(large) - exact).abs().max() < 1e-3
    error = (scores(large, kv_cache_dtype="fp8", calculate_kv_scales=True) - exact).abs()
    assert error.mean() < SMALL


def test_scales_are_each_heads_own_and_the_same_at_every_start(large: Path) -> None:
    first, again = (build(large, kv_cache_dtype="fp8", calculate_kv_scales=True) for _ in range(2))
    for layer, other in zip(first.model.layers, again.model.layers, strict=True):
        scale = layer.attention.kv_scale  # type: ignore[union-attr]
        assert scale.equal(other.attention.kv_scale)  # type: ignore[arg-type, operator, union-attr]
        assert scale.unique().numel() == 4  # type: ignore[operator]  # K and V of two heads
        assert (scale[1] > 100 * scale[0]).all()  # type: ignore[index]


def test_scales_leave_headroom_and_nothing_at_one() -> None:
    kv = torch.zeros(2, 3, 2, 4, 8)
    kv[0, 1, 0, 2, 3], kv[1, 2, 1, 0, 0] = -224.0, 2.0
    assert e4m3_scales(kv).tolist() == [[1.0, 1.0], [1.0, pytest.approx(2 / 224)]]


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("attn.k_scale", "attn.v_scale")],
)
def test_scales_of_the_checkpoint(large: Path, exact: torch.Tensor, k_name: str, v_name: str) -> None:
    """One for a layer, or one for each head; those of queries have no use."""
    layers = [f"model.layers.{i}.self_attn." for i in range(2)]
    scales = {layers[0] + k_name: torch.tensor(0.5), layers[1] + k_name: torch.tensor([0.5])}
    scales |= {layer + v_name: torch.full((2, 1, 1), LARGE / 10) for layer in layers}
    scales |= {layers[0] + "q_scale": torch.tensor(3.0)}
    add_scales(large, scales)
    runner = build(large)
    assert runner.model.layers[1].attention.kv_scale.tolist() == [[0.5, 0.5], [200.0, 200.0]]  # type: ignore[operator, union-attr]
    assert (scores(large) - exact).abs().max() < 1e-3  # a wider cache needs none
    error = (scores(large, kv_cache_dtype="fp8") - exact).abs()
    assert error.mean() < SMALL


@pytest.mark.parametrize("scale", [[0.0], [-1.0], [float("nan")], [float("inf")], [1e-20], [1.0, 1.0, 1.0]])
def test_scales_that_cannot_be(large: Path, scale: list[float]) -> None:
    add_scales(large, {"model.layers.1.self_attn.k_scale": torch.tensor(scale)})
    with pytest.raises(ModelError, match=r"'model.layers.1.self_attn.k_scale' must be a positive number.* 2 KV heads"):
        build(large)


def test_scales_of_no_layer_are_left_over(large: Path) -> None:
    add_scales(large, {"model.layers.2.self_attn.k_scale": torch.tensor(1.0)})
    with pytest.raises(ModelError, match=r"model.layers.2.self_attn.k_scale"):
        build(large)


def test_checkpoints_that_quantise_only_their_cache_are_welcome(large: Path) -> None:
    config = json.loads((large / "config.json").read_text())
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}}
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    for groups in ({}, {"attention": attention}):
        config["quantization_config"] = quantization | {"config_groups": groups}
        (large / "config.json").write_text(json.dumps(config))
        assert read_spec(large).quantization is None


def test_what_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be .*fp8.*, got 'fp8_e5m2'"):
        EngineConfig(model="any", kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ConfigError, match="calculate_kv_scales needs kv_cache_dtype fp8"):
        EngineConfig(model="any", calculate_kv_scales=True)
    config = EngineConfig(model=str(tiny_model), device="cuda", kv_cache_dtype="fp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"fp8 needs compute capability 8\.9 .* that of an A100 is 8\.0"):
        runner_options(config, read_spec(tiny_model), offline=True)


def test_the_story_model_tells_nearly_the_same(story_model: Path) -> None:
    """Compare each token that it should choose: 91 % are still its first choice, log-probabilities are off by 0.06 on
    average.
    """
    stories = json.loads((story_model / "expected_greedy.json").read_text())
    prompts = [{"prompt_token_ids": story["prompt_ids"] + story["output_ids"]} for story in stories]
    found: list[list[Any]] = []
    for settings in ({}, {"kv_cache_dtype": "fp8"}):
        llm = LLM(model=str(story_model), device="cpu", **settings)
        results = llm.generate(prompts, SCORED, use_tqdm=False)
        llm.close()
        found.append([])
        for story, prompt, result in zip(stories, prompts, results, strict=True):
            at = range(len(story["prompt_ids"]), len(prompt["prompt_token_ids"]))
            found[-1] += [result.prompt_logprobs[i][prompt["prompt_token_ids"][i]] for i in at]  # type: ignore[index]
    same = sum(quantised.rank == exact.rank for exact, quantised in zip(*found, strict=True))
    errors = [abs(quantised.logprob - exact.logprob) for exact, quantised in zip(*found, strict=True)]
    assert same / len(errors) > 0.85
    assert sum(errors) / len(errors) < 0.1
