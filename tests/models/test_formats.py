"""Weights of few bits: every published layout stands for what its writer says, alone and divided among ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kernels
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.quantization import choose_quantization
from engine.models.shard import Shard
from engine.models.weights import load_model
from kernels import reference
from tests.models.test_shard import on_ranks
from tests.oracles.families import make_checkpoint, make_prompts
from tests.oracles.paged_runner import decode
from tests.oracles.quantised import FORMATS, excludes, make_quantised

UP = "model.layers.0.mlp.up_proj."


def load(folder: Path, **options: Any) -> Any:
    options = {"dtype": torch.float32, "device": "cpu", "max_model_len": 256, **options}
    model = load_model(folder, options.pop("spec", None) or read_spec(folder), **options)
    model.pack_weights()
    return model


def logits(model: Any) -> Tensor:
    return torch.cat([decoded.logits for decoded in decode(model, make_prompts(), 1)])


@pytest.mark.parametrize("name", FORMATS)
def test_it_computes_with_what_is_stored(tmp_path: Path, name: str) -> None:
    make_quantised(name, tmp_path / "stored", tmp_path / "exact")
    model = load(tmp_path / "stored")
    for layer, quantised in enumerate([True, not excludes(FORMATS[name][0]), True]):
        mlp = model.layers[layer].mlp
        assert isinstance(mlp.down.weight, kernels.QuantizedWeight) == quantised
    assert model.lm_head.weight.dtype == torch.float32
    error = logits(model) - logits(load(tmp_path / "exact"))
    assert error.abs().max() <= 3e-5


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("fp8-tensor", 2),
        ("fp8-deepseek", 4),  # ranks' rows begin in the middle of a block
        ("int8", 4),
        ("int4", 2),
        ("int4-asymmetric", 2),
        ("gptq-v2", 2),
        ("awq", 2),
        ("nvfp4", 4),
        ("mxfp4", 2),
    ],
)
def test_ranks_equal_one_rank(tmp_path: Path, name: str, size: int) -> None:
    """The matrices that ranks divide by input channels are as wide as groups allow."""
    make_quantised(name, tmp_path, shape={"intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64})
    expected = logits(load(tmp_path))

    def work(shard: Shard, communicator: Any) -> Tensor:
        return logits(load(tmp_path, shard=shard, communicator=communicator))

    for got in on_ranks(size, work):
        assert (got - expected).abs().max() <= 3e-5


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("int4", 2, r"mlp.down_proj: ranks cannot divide its 192 channels, which are stored 64 together"),
        ("fp8-deepseek", 2, r"o_proj: ranks cannot divide its 128 channels, which are stored 128 together"),
        ("gptq-desc-act", 2, r"'g_idx' must give every group as many channels; with tensor parallelism it cannot"),
    ],
)
def test_what_ranks_cannot_divide(tmp_path: Path, name: str, size: int, message: str) -> None:
    shape = {"intermediate_size": 256} if name == "gptq-desc-act" else {}
    make_quantised(name, tmp_path, shape=shape)
    with pytest.raises(ModelError, match=message):
        load(tmp_path, shard=Shard(0, size))


@pytest.mark.parametrize("name", FORMATS)
def test_dummy_weights(tmp_path: Path, name: str) -> None:
    """As large as those of a model: so that a benchmark computes with ordinary numbers."""
    make_quantised(name, tmp_path)
    model = load(tmp_path, load_format="dummy")
    weight = model.layers[0].mlp.gate_up.weight
    std = kernels.dequantize(weight.codes, weight, torch.float32).std().item()
    assert 0.015 <= std <= 0.025
    assert logits(model).isfinite().all()


@pytest.mark.parametrize(("method", "dtype", "bound"), [("fp8", torch.float8_e4m3fn, 0.12), ("int8", torch.int8, 0.04)])
def test_a_float_checkpoint_rounded_while_it_is_loaded(tmp_path: Path, method: str, dtype: Any, bound: float) -> None:
    make_checkpoint("llama-biases", tmp_path)
    spec = read_spec(tmp_path)
    exact = logits(load(tmp_path))
    rounded = load(tmp_path, spec=replace(spec, quantization=choose_quantization(None, method)))
    weight = rounded.layers[0].mlp.down.weight
    assert (weight.codes.dtype, weight.scale.shape, weight.codes.shape) == (dtype, (128, 1), (128, 192))
    assert rounded.lm_head.weight.dtype == torch.float32
    error = (logits(rounded) - exact).norm() / exact.norm()
    assert 1e-3 < error < bound


def test_rounding_rows() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, -127.0], [448.0, 1.0], [1e-3, -2e-3]])
    for dtype, step in ((torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 2**-4)):
        codes, scale = reference.quantize_rows(x, dtype)
        assert codes.dtype == dtype
        error = (codes.float() * scale - x).abs()
        assert (error <= step * x.abs().amax(1, keepdim=True) + 1e-12).all()


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors = {key: value for key, value in load_file(file).items() if key != name}
    save_file(tensors | ({} if tensor is None else {name: tensor}), file)


def test_a_float_where_codes_are_to_be(tmp_path: Path) -> None:
    make_quantised("int8", tmp_path)
    change(tmp_path, UP + "weight", torch.zeros(192, 128))
    message = rf"'{UP}weight' is stored as F32, config.json \('quantization_config'\) says I8; are the weights"
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_scale_that_is_missing(tmp_path: Path) -> None:
    make_quantised("int8", tmp_path)
    change(tmp_path, UP + "weight_scale", None)
    with pytest.raises(ModelError, match=rf"the weights lack '{UP}weight_scale'"):
        load(tmp_path)


def test_codes_without_a_configuration_that_says_so(tmp_path: Path) -> None:
    make_quantised("int8", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"weight_scale' and 15 more, which config.json has no place for"):
        load(tmp_path)


def test_parts_of_one_product_must_be_stored_alike(tmp_path: Path) -> None:
    make_quantised("int8", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] = ["up_proj"]
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"gate_proj, model.layers.0.mlp.up_proj must be stored alike"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["int4", "int4-asymmetric", "int4-channel", "int8-groups", "nvfp4", "mxfp4"])
def test_the_writers_agree_with_compressed_tensors(name: str) -> None:
    """That package writes most such checkpoints."""
    oracle = pytest.importorskip("compressed_tensors")
    config, writer = FORMATS[name]
    stored, exact = writer(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))
    compressor = oracle.compressors.BaseCompressor.get_value_from_registry(config["format"])
    scheme = oracle.quantization.QuantizationScheme(**config["config_groups"]["group_0"])
    theirs = compressor.decompress(stored, scheme)["weight"]
    torch.testing.assert_close(theirs.double(), exact, rtol=4e-3, atol=0)
