"""Every shape is a model that Quire reads and builds, and weighs what its name says."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.model_shapes import SHAPES, model_folder
from engine.errors import ConfigError
from engine.models.drafters.dflash import read_dflash
from engine.models.drafters.eagle3 import read_eagle3
from engine.models.drafters.spec import DraftSpec
from engine.models.families import read_spec
from engine.models.spec import ModelSpec
from engine.models.weights import decoder_of_shapes

BILLIONS = {  # of parameters, of those shapes whose published number is known
    "qwen3.5-0.8b": 0.75,
    "qwen3.8-27b": 27,
    "qwen3.8-27b-fp8-block": 2.57,  # those that are not quantised
    "qwen3.6-35b-a3b": 35,
    "nemotron-3-nano": 31.6,
    "lfm2-350m": 0.354,
}
TARGET = "qwen3-8b"
DRAFTERS: dict[str, Callable[[Path, ModelSpec], DraftSpec]] = {  # no models to serve, but for a target
    "qwen3-8b-eagle3": read_eagle3,
    "qwen3-8b-dflash": functools.partial(read_dflash, num_tokens=7),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_read_as_its_config_says(name: str, tmp_path: Path) -> None:
    folder = model_folder(name, tmp_path)
    assert folder == tmp_path / name
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    if name in DRAFTERS:
        spec = DRAFTERS[name](folder, read_spec(model_folder(TARGET, tmp_path))).model
    else:
        spec = read_spec(folder)
    assert spec.hidden_size == text["hidden_size"]
    pattern = text.get("hybrid_override_pattern", "")  # whose mixers and MLPs count as layers of their own
    assert spec.num_layers == text["num_hidden_layers"] or spec.num_layers < len(pattern)
    assert (spec.vision is not None) == ("vision_config" in config)
    assert model_folder(str(folder), Path("/unused")) == folder


def test_an_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean qwen3-0\.6b"):
        model_folder("qwen3-0.6", tmp_path)


@pytest.mark.parametrize("name", BILLIONS)
def test_a_hybrid_shape_has_as_many_parameters_as_its_name_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    spec = dataclasses.replace(read_spec(tmp_path), vision=None)  # a name counts the text model
    model = decoder_of_shapes(spec, torch.bfloat16, tmp_path)
    count = sum(each.numel() for each in itertools.chain(model.parameters(), model.buffers()))
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.04)


def test_drafters_fit_their_target(tmp_path: Path) -> None:
    target = read_spec(model_folder(TARGET, tmp_path))
    found = {name: read(model_folder(name, tmp_path), target) for name, read in DRAFTERS.items()}
    eagle3, block = found["qwen3-8b-eagle3"].eagle3, found["qwen3-8b-dflash"].block
    assert eagle3 is not None
    assert (eagle3.target_layers, eagle3.draft_vocab_size) == ((2, 18, 33), 32000)
    assert block is not None
    assert (block.length, block.target_layers) == (8, (1, 9, 17, 25, 33))
