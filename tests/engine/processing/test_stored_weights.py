"""The figures of a model's weights in lists of models."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engine.models.families import read_spec
from engine.models.quantization import Quantization
from engine.processing.stored_weights import StoredWeights
from tests.support.tiny_model import write_model


@pytest.mark.parametrize("experts", [False, True])
def test_figures_of_a_folder(tmp_path: Path, experts: bool) -> None:
    folder = write_model(tmp_path / "m", experts)
    weights = StoredWeights(folder, read_spec(folder, {}), device="cpu")
    tensors = load_file(folder / "model.safetensors")
    assert weights.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert weights.num_bytes == (folder / "model.safetensors").stat().st_size
    assert weights.num_bytes_on_gpu == 0
    assert (weights.format, weights.quantization_level) == ("safetensors", "F32")
    assert replace(weights, quantization="int8").quantization_level == "INT8"


def test_only_files_that_are_read_count(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    spec, file = read_spec(folder, {}), folder / "model.safetensors"
    size = file.stat().st_size
    names = list(load_file(file))
    (folder / "consolidated.safetensors").write_bytes(b"x" * 100)
    file.rename(folder / "model-1.safetensors")
    file.write_bytes(b"stale")
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert StoredWeights(folder, spec).num_bytes == size
    os.remove(folder / "model.safetensors.index.json")
    for each in folder.glob("*.safetensors"):
        each.unlink()
    unwritten = StoredWeights(folder, spec)  # random weights
    assert unwritten.num_bytes == 4 * unwritten.num_parameters
    (folder / "pytorch_model.bin").write_bytes(b"x" * 50)
    pickled = StoredWeights(folder, spec)
    assert (pickled.num_bytes, pickled.format) == (50, "pytorch")


@pytest.mark.parametrize(
    ("name", "level"),
    [("Llama-3-8B-Q4_K_M", "Q4_K_M"), ("gemma.IQ4_XS", "IQ4_XS"), ("m-BF16-00001-of-00002", "BF16"), ("model", "GGUF")],
)
def test_type_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, level: str) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    folder = write_model(tmp_path / "gguf" / "m")
    file = tmp_path / f"{name}.gguf"
    file.write_bytes(b"x" * 70)
    (folder / "gguf.json").write_text(json.dumps({"files": [[str(file), 70, 0]], "tensors": {}}))
    spec = replace(read_spec(folder, {}), quantization=_named("gguf"))
    weights = StoredWeights(folder, spec)
    assert (weights.format, weights.num_bytes, weights.quantization_level) == ("gguf", 70, level)


def test_a_tensor_that_is_embedding_and_head_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    folder = write_model(tmp_path / "gguf" / "m")
    tied = read_spec(folder, {})
    spec = replace(tied, tie_word_embeddings=False)

    def counted(head_start: int) -> int:
        stored = {"model.embed_tokens.weight": {"file": "a", "start": 0}, "lm_head": {"file": "a", "start": head_start}}
        (folder / "gguf.json").write_text(json.dumps({"files": [], "tensors": stored}))
        return StoredWeights(folder, spec).num_parameters

    assert counted(0) == StoredWeights(folder, tied).num_parameters
    assert counted(99) == counted(0) + tied.vocab_size * tied.hidden_size


def _named(method: str) -> Quantization:
    return Quantization(method=method, schemes=())
