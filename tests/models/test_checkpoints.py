"""Checkpoints other than files: tensors in memory, by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.models.checkpoints import NamedTensors, SafetensorsFolder, open_checkpoint
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.matrix import CheckpointTensor
from engine.models.shard import Shard, Span
from engine.models.weights import checkpoint_tensors
from tests.models.test_weights import CONFIG
from tests.oracles.families import make_checkpoint
from tests.oracles.quantised import make_quantised
from tests.support.loaded import load

pytest.importorskip("transformers")


def memory(model: Any) -> dict[str, Tensor]:
    return {name: tensor.memory for name, tensor in checkpoint_tensors(model).items()}


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "gemma4_small", "qwen3_moe fp8-channel", "fp8-static"])
@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)], ids=["alone", "second of two"])
def test_weights_in_memory_are_those_of_files(name: str, shard: Shard, tmp_path: Path) -> None:
    (make_quantised if "fp8" in name else make_checkpoint)(name, tmp_path)
    spec, tensors = read_spec(tmp_path), load_file(tmp_path / "model.safetensors")
    from_files = memory(load(tmp_path, spec, shard=shard))
    in_memory = memory(load(NamedTensors(tensors), spec, shard=shard))
    assert in_memory.keys() == from_files.keys()
    for each, tensor in in_memory.items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), from_files[each].view(-1).view(torch.uint8)), each


@pytest.fixture
def spec(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return read_spec(tmp_path)


def test_errors_name_the_origin(spec: Any) -> None:
    tensors = {name: torch.zeros(tensor.shape) for name, tensor in checkpoint_tensors(dummy(spec)).items()}

    def error(**changes: Tensor) -> str:
        with pytest.raises(ModelError) as caught:
            load(NamedTensors(tensors | changes, "new weights"), spec)
        return str(caught.value)

    assert error(extra=torch.zeros(1)).startswith("new weights: holds 'extra'")
    norm = "model.norm.weight"
    assert error(**{norm: torch.zeros(9)}).startswith(f"new weights: '{norm}' has shape [9], config.json says [32]")
    assert error(**{norm: torch.zeros(32, dtype=torch.int8)}).startswith(f"new weights: '{norm}' is stored as I8")
    assert error(**{norm: torch.zeros(32, dtype=torch.complex64)}).startswith(
        f"new weights: '{norm}' has dtype torch.com"
    )
    del tensors[norm]
    assert error().startswith(f"new weights: the weights lack '{norm}'")


def dummy(spec: Any) -> Any:
    return load(Path("nowhere"), spec, load_format="dummy")


def test_unknown_formats() -> None:
    with pytest.raises(ModelError, match="load_format must be auto, safetensors or dummy, got 'gguf'"):
        open_checkpoint(Path("nowhere"), "gguf")


def test_values_of_several_files_come_file_by_file(tmp_path: Path) -> None:
    """Each file is opened once, and each value is read once, from its own file."""
    make_checkpoint("llama", tmp_path, max_shard_size="200KB")
    checkpoint = SafetensorsFolder(tmp_path)
    stored = checkpoint.tensors()
    wanted = sorted(stored)
    wanted = wanted[::2] + wanted[1::2]
    read = dict(checkpoint.read(wanted))
    files = [stored[name].source for name in read]
    assert len(set(files)) > 2
    assert sum(a != b for a, b in itertools.pairwise(files)) == len(set(files)) - 1
    assert read.keys() == stored.keys()
    declared = {name: CheckpointTensor(name, (Span.whole(1),), torch.empty(0)) for name in wanted}
    for name, value in checkpoint.read_to(torch.device("cpu"), declared):
        assert value is not None
        assert list(value.shape) == stored[name].shape
        assert torch.equal(value, load_file(stored[name].source)[name])
