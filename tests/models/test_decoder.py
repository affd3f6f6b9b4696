"""The decoder against transformers and against a real model's exact text."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import kernels
from benchmarks.model_shapes import model_folder
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.families import read_spec
from engine.models.formats import weight_formats
from engine.models.matrix import Scope
from engine.models.residual import ResidualStream
from tests.oracles.families import (
    CASES,
    MAX_ERROR,
    MORE_WITH_IMAGES,
    check_family,
    make_checkpoint,
    make_prompts,
    passes,
)
from tests.oracles.paged_runner import decode
from tests.support.loaded import load as load_model

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", CASES)
def test_family_equals_transformers(name: Any) -> None:
    result = check_family(name, "cpu", torch.float32)
    assert result["greedy_equal"]
    assert result["max_error"] <= MAX_ERROR, result


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_WITH_IMAGES)
def test_text_of_other_multimodal_models_equals_transformers(name: Any) -> None:
    test_family_equals_transformers(name)


@pytest.mark.parametrize("name", ["llama-gqa4-llama3", "qwen3", "gemma3", "cohere2", "glm4_moe"])
def test_bfloat16_is_as_exact_as_transformers(name: str) -> None:
    result = check_family(name, "cpu", torch.bfloat16)
    assert passes(result, torch.bfloat16), result


def load(folder: Path, **options: Any) -> Any:
    options = {"dtype": torch.float32, "device": "cpu", "max_model_len": 256, **options}
    return load_model(folder, read_spec(folder), **options)


def logits(model: Any) -> Tensor:
    return torch.cat([decoded.logits for decoded in decode(model, make_prompts(), 1)])


@pytest.mark.parametrize(
    "name", ["qwen3-window", "gemma3", "cohere2", "glm4_moe", "glm4_moe_lite", "gemma4_moe", "gemma4_small"]
)
def test_hidden_states_at_logits_indices(name: Any, tmp_path: Path) -> None:
    """Norms after sublayers, attention beside the MLP, experts, latents, embeddings of each layer."""
    make_checkpoint(name, tmp_path)
    model = load(tmp_path)
    forward, num_compared = model.forward, 0

    def both(ids: Tensor, *args: Any) -> Tensor:
        nonlocal num_compared
        hidden, indices = forward(ids, *args), torch.arange(len(ids) - 1, -1, -2)
        part = forward(ids, *args, logits_indices=indices)
        assert part.shape == (len(indices), hidden.shape[1])
        torch.testing.assert_close(part, hidden[indices], rtol=1e-5, atol=1e-5)
        num_compared += 1
        return hidden

    model.forward = both
    logits(model)
    assert num_compared


@pytest.mark.parametrize(
    ("name", "has_both"),  # a norm after a sublayer and one before the next
    [("gemma2", True), ("gemma3", True), ("qwen3-window", False), ("olmo2", False), ("cohere2", False)],
)
def test_norms_computed_with_the_sum_before(
    name: str, has_both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(name, tmp_path)
    model, together, passes = load(tmp_path), Mock(wraps=kernels.add_rms_norm), 0
    forward = model.forward

    def counted(*args: Any, **options: Any) -> Tensor:
        nonlocal passes
        passes += 1
        return cast(Tensor, forward(*args, **options))

    model.forward = counted
    monkeypatch.setattr(kernels, "add_rms_norm", together)
    got = logits(model)
    assert together.call_count == (passes * (2 * len(model.layers) - 1) if has_both else 0)
    monkeypatch.setattr(kernels, "norms_apart", lambda *_: False)  # as if all products contained their norms
    together.reset_mock()
    assert torch.equal(got, logits(model))
    assert not together.called


def test_shards_equal_one_file(tmp_path: Path) -> None:
    make_checkpoint("qwen3-window", tmp_path / "one")
    make_checkpoint("qwen3-window", tmp_path / "shards", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(tmp_path / "one")), logits(load(tmp_path / "shards")))


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("llama-linear", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 10000.0}),
        ("llama-dynamic", {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "rope_theta": 10000.0}),
        (
            "llama-gqa4-llama3",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "rope_theta": 500000.0,
            },
        ),
        (
            "qwen2-yarn",
            {
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
                "rope_theta": 1e4,
            },
        ),
    ],
)
def test_old_rope_spelling_is_the_same_model(tmp_path: Path, name: str, old: dict[str, Any]) -> None:
    make_checkpoint(name, tmp_path)
    new_spec = read_spec(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config | old))
    assert read_spec(tmp_path) == new_spec


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_story_model_greedy_text(story_model: Path, chunk: int) -> None:
    expected = json.loads((story_model / "expected_greedy.json").read_text())
    model = load_model(story_model, read_spec(story_model), dtype=torch.float32, device="cpu")
    longest = max(len(entry["output_ids"]) for entry in expected)
    got = decode(model, [entry["prompt_ids"] for entry in expected], longest, chunk=chunk)
    for entry, decoded in zip(expected, got, strict=True):
        assert decoded.token_ids[: len(entry["output_ids"])] == entry["output_ids"]


def test_story_model_alone(story_model: Path) -> None:
    entry = json.loads((story_model / "expected_greedy.json").read_text())[0]
    model = load_model(story_model, read_spec(story_model), dtype=torch.float32, device="cpu")
    (got,) = decode(model, [entry["prompt_ids"]], len(entry["output_ids"]), block_size=4)
    assert got.token_ids == entry["output_ids"]


def test_dummy_weights(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    one, same, other = (load(tmp_path, load_format="dummy", seed=seed, dtype=torch.bfloat16) for seed in (1, 1, 2))
    assert torch.equal(logits(one), logits(same))
    assert not torch.equal(logits(one), logits(other))
    assert logits(one).isfinite().all()
    assert one.layers[0].attention.q_norm.weight.eq(1).all()
    assert one.lm_head.weight is one.embed_tokens.weight
    assert 0.018 < one.lm_head.weight.float().std() < 0.022
    assert not any(parameter.requires_grad for parameter in one.parameters())


def test_few_layers_stand_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows in five layers and none in the sixth; one layer's weights differ. A layer after one that is left out
    computes the norm itself.
    """
    computed: list[tuple[DecoderLayer, bool]] = []

    def forward(layer: DecoderLayer, x: ResidualStream, *_: Any) -> ResidualStream:
        computed.append((layer, x.normed is None))
        return ResidualStream(x.hidden, x.hidden)

    monkeypatch.setattr(DecoderLayer, "forward", forward)
    spec = read_spec(Path(model_folder("gemma-3-12b", tmp_path)))

    def numbers(count: int) -> list[int]:
        part = replace(spec, layers=spec.layers[:count])
        decoder = Decoder(part, Scope(torch.bfloat16, torch.device("meta"), weight_formats(None)), max_model_len=64)
        layers = cast(list[DecoderLayer], list(decoder.layers))
        if count > 20:
            cast(Any, layers[20].mlp).down.weight = torch.nn.Parameter(torch.empty(1, device="meta"))
        nothing = torch.empty(0)
        run = partial(decoder, nothing, nothing, [nothing] * count, [Mock()] * count, nothing)
        computed.clear()
        with decoder.few_layers():
            run()
        few = [layers.index(layer) for layer, _ in computed]
        assert [alone for _, alone in computed] == [i - 1 not in few for i in few]
        computed.clear()
        run()
        assert [layer for layer, _ in computed] == layers
        return few

    assert numbers(48) == [0, 1, 4, 5, 6, 19, 20, 21, 46, 47]
    assert numbers(3) == [0, 1, 2]
    assert numbers(1) == [0]
