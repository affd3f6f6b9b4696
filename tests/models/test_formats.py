"""Low-bit weights: every published layout stands for what its writer says, alone and divided among ranks."""

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
from kernels import reference
from tests.models.test_shard import on_ranks
from tests.oracles.families import make_checkpoint, make_prompts
from tests.oracles.paged_runner import decode
from tests.oracles.quantised import EXPERTS, FORMATS, excludes, make_quantised
from tests.support.loaded import load as load_model


@pytest.fixture(autouse=True)
def weights_stay_as_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip packing, which is a backend's own subject: `tests/kernels/cpu`."""
    monkeypatch.setattr(kernels, "pack_weight", reference.pack_weight)


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


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_compute_with_what_is_stored(tmp_path: Path, name: str) -> None:
    make_quantised(name, tmp_path / "stored", tmp_path / "exact")
    model, exact = load(tmp_path / "stored"), load(tmp_path / "exact")
    moe = model.layers[2].mlp
    assert isinstance(moe.gate_up.weight, kernels.QuantizedWeight)
    assert isinstance(moe.down.weight, kernels.QuantizedWeight)
    assert moe.router.weight.dtype == torch.float32
    if (up := getattr(model.layers[0].attention, "up", None)) is not None:
        assert isinstance(up.weight, Tensor)  # latent attention multiplies by it in a way of its own
    error = logits(model) - logits(exact)
    assert error.abs().max() <= 3e-5


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3_moe fp8-deepseek"])
def test_ranks_hold_whole_experts(tmp_path: Path, name: str) -> None:
    make_quantised(name, tmp_path, shape={"num_attention_heads": 8, "head_dim": 64})
    whole = load(tmp_path)
    expected = logits(whole)

    def work(shard: Shard, communicator: Any) -> Tensor:
        model = load(tmp_path, shard=shard, communicator=communicator)
        assert len(model.layers[0].mlp.down.weight) == len(whole.layers[0].mlp.down.weight) // 2
        return logits(model)

    for got in on_ranks(2, work):
        assert (got - expected).abs().max() <= 3e-5


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("fp8-tensor", 2),
        ("fp8-deepseek", 4),  # ranks' rows begin in the middle of a block
        ("int8", 4),
        ("int4", 2),
        ("int4-asymmetric", 2),
        ("gptq-v2", 2),
        ("gptq-int3", 2),
        ("awq", 2),
        ("torchao-int8", 2),
        ("torchao-int4", 2),
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
        ("torchao-int4-tiles", 2, r"o_proj: ranks cannot divide its 128 channels, which are stored 1024 together"),
        ("awq-gemv", 2, r"o_proj: AWQ's gemv layout cannot be divided by input channels among ranks"),
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
    """Dummy weights are as large as a model's, so that a benchmark computes with ordinary numbers."""
    make_quantised(name, tmp_path)
    model = load(tmp_path, load_format="dummy")
    weight = model.layers[0].mlp.gate_up.weight
    std = kernels.dequantize(weight.codes, weight, torch.float32).std().item()
    assert 0.015 <= std <= 0.025
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3_moe awq"])
def test_dummy_experts(tmp_path: Path, name: str) -> None:
    make_quantised(name, tmp_path)
    model = load(tmp_path, load_format="dummy")
    expert = model.layers[0].mlp.gate_up.weight[1]
    assert 0.015 <= kernels.dequantize(expert.codes, expert, torch.float32).std().item() <= 0.025
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


def test_int4_is_rounded_in_groups_while_it_is_loaded(tmp_path: Path) -> None:
    make_checkpoint("llama-biases", tmp_path)
    spec, exact = read_spec(tmp_path), load(tmp_path)
    rounded = load(tmp_path, spec=replace(spec, quantization=choose_quantization(None, "int4")))
    weight, floats = rounded.layers[0].mlp.down.weight, exact.layers[0].mlp.down.weight
    assert (weight.codes.shape, weight.scale.shape, weight.scale.dtype) == ((128, 96), (128, 6), torch.bfloat16)
    error = kernels.dequantize(weight.codes, weight, torch.float32) - floats
    assert error.norm() < 0.1 * floats.norm()
    error = (logits(rounded) - logits(exact)).norm() / logits(exact).norm()
    assert 1e-2 < error < 0.5


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama-biases", "qwen2"])
def test_an_output_head_rounded_while_it_is_loaded(tmp_path: Path, family: str, method: str) -> None:
    """One that is the embedding is rounded for products alone."""
    make_checkpoint(family, tmp_path)
    spec, exact = read_spec(tmp_path), load(tmp_path)
    assert spec.tie_word_embeddings == (family == "qwen2")
    rounded = load(tmp_path, spec=replace(spec, quantization=choose_quantization(None, method, rounds_head=True)))
    head, floats = rounded.lm_head.weight, exact.lm_head.weight
    assert head.kind == "int8"
    assert torch.equal(rounded.embed_tokens.weight, exact.embed_tokens.weight)
    assert (kernels.dequantize(head.codes, head, torch.float32) - floats).norm() < 0.01 * floats.norm()
    assert isinstance(load(tmp_path, load_format="dummy", spec=rounded.spec).lm_head.weight, kernels.QuantizedWeight)


def test_four_bytes_hold_codes_of_e2m1(tmp_path: Path) -> None:
    make_quantised("mxfp4", tmp_path)
    spec = read_spec(tmp_path)
    mlp = spec.layers[0].mlp
    assert mlp is not None
    odd = replace(spec.layers[0], mlp=replace(mlp, intermediate_size=196))
    with pytest.raises(ModelError, match=r"down_proj: e2m1 needs a multiple of 8 input channels, got 196"):
        load(tmp_path, load_format="dummy", spec=replace(spec, layers=(odd,)))


def test_int4_needs_whole_groups(tmp_path: Path) -> None:
    make_checkpoint("llama-biases", tmp_path)
    spec = replace(read_spec(tmp_path), quantization=choose_quantization(None, "int4"))
    mlp = spec.layers[0].mlp
    assert mlp is not None
    odd = replace(spec.layers[0], mlp=replace(mlp, intermediate_size=200))
    with pytest.raises(ModelError, match=r"down_proj: int4 needs a multiple of 32 input channels, got 200"):
        load(tmp_path, load_format="dummy", spec=replace(spec, layers=(odd,)))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_rounded_while_they_are_loaded(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router stays as it is."""
    make_checkpoint(family, tmp_path)
    quantize_rows = kernels.quantize_rows

    def as_on_a_gpu(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        assert x.stride(1) == 1, "a row lies in one piece"
        return quantize_rows(x, dtype)

    monkeypatch.setattr(kernels, "quantize_rows", as_on_a_gpu)
    spec, exact = read_spec(tmp_path), load(tmp_path)
    rounded = load(tmp_path, spec=replace(spec, quantization=choose_quantization(None, "fp8")))
    moe, plain = rounded.layers[2].mlp, exact.layers[2].mlp
    assert torch.equal(moe.router.weight, plain.router.weight)
    for few, floats in ((moe.gate_up.weight, plain.gate_up.weight), (moe.down.weight, plain.down.weight)):
        assert few.codes.dtype == torch.float8_e4m3fn
        assert few.codes.shape == floats.shape
        for expert in range(len(floats)):
            own = few[expert]
            error = kernels.dequantize(own.codes, own, torch.float32) - floats[expert]
            assert error.abs().max() <= floats[expert].abs().max() / 16


def test_experts_of_int4_rounded_while_they_are_loaded_lie_as_gpus_read_them(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    spec, exact = read_spec(tmp_path), load(tmp_path)
    rounded = load(tmp_path, spec=replace(spec, quantization=choose_quantization(None, "int4")))
    moe, plain = rounded.layers[2].mlp, exact.layers[2].mlp
    for few, floats in ((moe.gate_up.weight, plain.gate_up.weight), (moe.down.weight, plain.down.weight)):
        assert few.lies_by_groups()
        for expert in range(len(floats)):
            own = few[expert]
            error = kernels.dequantize(own.codes, own, torch.float32) - floats[expert]
            assert error.norm() < 0.1 * floats[expert].norm()


def test_rounding_rows() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, -127.0], [448.0, 1.0], [1e-3, -2e-3]])
    for dtype, step in ((torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 2**-4)):
        codes, scale = reference.quantize_rows(x, dtype)
        assert codes.dtype == dtype
        error = (codes.float() * scale - x).abs()
        assert (error <= step * x.abs().amax(1, keepdim=True) + 1e-12).all()


def test_rounding_groups() -> None:
    """No value is further than a step from its own, the largest of a group among them; a group of zeros stays one."""
    x = torch.randn(5, 96) * torch.rand(5, 3).repeat_interleave(32, 1)
    x[2, 32:64] = 0
    codes, scale = reference.quantize_groups(x, 32)
    assert (codes.dtype, scale.shape) == (torch.uint8, (5, 3))
    assert codes.max() <= 15
    rounded = (codes.float() - 8) * scale.float().repeat_interleave(32, 1)
    largest = x.unflatten(1, (3, 32)).abs().amax(2).repeat_interleave(32, 1)
    assert ((rounded - x).abs() <= largest / 7 * 1.01).all()
    assert (rounded - x).norm() < 0.1 * x.norm()


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
    """Most such checkpoints are written by that package."""
    oracle = pytest.importorskip("compressed_tensors")
    config, writer = FORMATS[name]
    stored, exact = writer(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))
    compressor = oracle.compressors.BaseCompressor.get_value_from_registry(config["format"])
    scheme = oracle.quantization.QuantizationScheme(**config["config_groups"]["group_0"])
    theirs = compressor.decompress(stored, scheme)["weight"]
    torch.testing.assert_close(theirs.double(), exact, rtol=4e-3, atol=0)
