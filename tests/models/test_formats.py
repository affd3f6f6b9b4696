"""The seam for weight formats, by an int8 one: what it stores, what it leaves alone, what a checkpoint may get wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from engine.models import weights
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.formats import FORMATS
from engine.models.formats.floats import FLOATS
from engine.models.layers import WeightFormat, empty
from engine.models.shard import Span
from engine.models.weights import load_model
from tests.oracles.families import make_checkpoint, make_prompts
from tests.oracles.paged_runner import decode


class Int8(WeightFormat):
    """`weight` int8 [out, in] times `weight_scale` [out, 1]; Linears named in `ignore` are floats."""

    def __init__(self, ignore: Any) -> None:
        self.ignore = ignore

    def for_linear(self, names: Any) -> Any:
        return FLOATS if any(name.endswith(tuple(self.ignore)) for name in names) else self

    def create(self, linear: Any, dtype: torch.dtype, device: Any) -> None:
        linear.weight = empty(linear.num_rows, len(linear.columns), dtype=torch.int8, device=device)
        linear.weight_scale = empty(linear.num_rows, 1, dtype=dtype, device=device)

    def tensors(self, linear: Any) -> Iterator[None]:  # type: ignore[override]
        yield from linear.stacked("weight", linear.columns, dtypes=frozenset({"I8"}))
        yield from linear.stacked("weight_scale", Span.whole(1))

    def product(self, linear: Any, x: Any, out: Any = None) -> Any:
        result = F.linear(x, linear.weight.to(x.dtype) * linear.weight_scale, linear.bias)
        return result if out is None else out.copy_(result)


def read(quantization: Any) -> Any:
    if quantization["bits"] != 8:
        raise ModelError(f"'quantization_config': bits must be 8, got {quantization['bits']}")
    return Int8(quantization["ignore"])


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An int8 checkpoint with biases. `exact.safetensors` in a folder of its own is what it stands for."""
    monkeypatch.setitem(FORMATS, "test-int8", "unused")
    monkeypatch.setattr(weights, "read_format", read)
    folder, exact = tmp_path / "int8", tmp_path / "exact"
    for each in (folder, exact):
        make_checkpoint("llama-biases", each)
    quantise(folder, exact, ignore=["lm_head", "layers.1.mlp.down_proj"])
    return folder


def quantise(folder: Path, exact: Any, ignore: Any) -> None:
    stored, rounded = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = rounded[name] = tensor
        if name.endswith("proj.weight") and not name.removesuffix(".weight").endswith(tuple(ignore)):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            stored[name], stored[name + "_scale"] = (tensor / scale).round().to(torch.int8), scale
            rounded[name] = stored[name] * scale
    save_file(stored, folder / "model.safetensors")
    save_file(rounded, exact / "model.safetensors")
    set_quantization(folder, {"quant_method": "test-int8", "bits": 8, "ignore": ignore})


def set_quantization(folder: Path, quantization: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def load(folder: Path, **options: Any) -> Any:
    model = load_model(folder, read_spec(folder), dtype=torch.float32, device="cpu", max_model_len=256, **options)
    model.pack_weights()
    return model


def logits(model: Any) -> Tensor:
    return torch.cat([decoded.logits for decoded in decode(model, make_prompts(), 1)])


def test_it_computes_with_the_weights_that_are_stored(folder: Path) -> None:
    model = load(folder)
    assert model.layers[0].attention.qkv.weight.dtype == torch.int8
    assert model.layers[1].mlp.down.weight.dtype == model.lm_head.weight.dtype == torch.float32
    error = logits(model) - logits(load(folder.parent / "exact"))
    assert error.abs().max() <= 3e-5


def test_dummy_weights(folder: Path) -> None:
    assert logits(load(folder, load_format="dummy")).isfinite().all()


def test_a_float_where_integers_are_to_be(folder: Path) -> None:
    name, file = "model.layers.0.mlp.up_proj.weight", folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].float()}, file)
    with pytest.raises(ModelError, match=rf"'{name}' is stored as F32; config.json says I8; are the weights"):
        load(folder)


def test_a_scale_that_is_missing(folder: Path) -> None:
    name, file = "model.layers.0.mlp.up_proj.weight_scale", folder / "model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file)
    with pytest.raises(ModelError, match=rf"the weights lack '{name}'"):
        load(folder)


def test_what_the_format_refuses_names_the_file(folder: Path) -> None:
    set_quantization(folder, {"quant_method": "test-int8", "bits": 4, "ignore": []})
    with pytest.raises(ModelError, match=r"config\.json: 'quantization_config': bits must be 8, got 4"):
        load(folder)
