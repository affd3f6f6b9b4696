"""Random checkpoints are what the loader takes, and the same each time."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import random_weights
from benchmarks.model_shapes import SHAPES
from engine.models.checkpoints.safetensors import INDEX
from engine.models.families import read_spec
from tests.support.loaded import load as load_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 128,
}  # fmt: skip
FORMATS = {
    "floats": None,
    "tied": None,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}


def folder(path: Path, name: str) -> Path:
    path.mkdir()
    config = CONFIG | ({"quantization_config": FORMATS[name]} if FORMATS[name] else {})
    config["tie_word_embeddings"] = name == "tied"
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_the_loader_takes_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "SHARD_BYTES", 200_000)
    first, second = folder(tmp_path / "a", name), folder(tmp_path / "b", name)
    for each in (first, second):
        random_weights.write_random_weights(each)
    shards = sorted(file.name for file in first.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        one, other = load_file(first / shard), load_file(second / shard)
        assert all(torch.equal(one[tensor].view(torch.uint8), other[tensor].view(torch.uint8)) for tensor in one)
        assert all(one[tensor].view(torch.uint8).any() for tensor in one)
    model = load_model(first, read_spec(first), dtype=torch.float32, device="cpu")
    assert not any(parameter.isnan().any() for parameter in model.parameters() if parameter.is_floating_point())


def test_weights_that_are_there_stay(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", "floats")
    (path / "model.safetensors").write_bytes(b"kept")
    random_weights.write_random_weights(path)
    assert (path / "model.safetensors").read_bytes() == b"kept"


def test_scales_of_fp8_blocks_have_the_published_name(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", "fp8")
    random_weights.write_random_weights(path)
    names = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
    scales = [name for name in names if "scale" in name]
    assert scales
    assert all(name.endswith(".weight_scale_inv") for name in scales)


def test_shapes_of_few_bits_say_that_routers_stay_as_they_are() -> None:
    shape = SHAPES["qwen3-30b-a3b-fp8-block"]
    left_out = shape["quantization_config"]["modules_to_not_convert"]
    assert {f"model.layers.{i}.mlp.gate" for i in range(shape["num_hidden_layers"])} < set(left_out)
