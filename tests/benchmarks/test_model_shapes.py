"""Every shape is a model that Quire reads and builds, and weighs what its name says."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from benchmarks.model_shapes import SHAPES, model_folder
from engine.models.drafters.dflash import read_dflash
from engine.models.drafters.eagle3 import read_eagle3
from engine.models.families import read_spec
from engine.models.weights import decoder_of_shapes

BILLIONS = {  # of parameters, of those shapes whose published number is known
    "qwen3.5-0.8b": 0.75,
    "qwen3.8-27b": 27,
    "qwen3.8-27b-fp8-block": 2.57,  # those that are not quantised
    "qwen3.6-35b-a3b": 35,
    "nemotron-3-nano": 31.6,
    "lfm2-350m": 0.354,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_a_hybrid_shape_has_as_many_parameters_as_its_name_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    spec = dataclasses.replace(read_spec(tmp_path), vision=None)  # a name counts the text model
    model = decoder_of_shapes(spec, torch.bfloat16, tmp_path)
    count = sum(each.numel() for each in itertools.chain(model.parameters(), model.buffers()))
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.04)


def test_drafters_fit_their_target(tmp_path: Path) -> None:
    folders = {name: model_folder(name, tmp_path) for name in ("qwen3-8b", "qwen3-8b-eagle3", "qwen3-8b-dflash")}
    target = read_spec(folders["qwen3-8b"])
    eagle3 = read_eagle3(folders["qwen3-8b-eagle3"], target).eagle3
    assert eagle3 is not None
    assert (eagle3.target_layers, eagle3.draft_vocab_size) == ((2, 18, 33), 32000)
    block = read_dflash(folders["qwen3-8b-dflash"], target, 7).block
    assert block is not None
    assert (block.length, block.target_layers) == (8, (1, 9, 17, 25, 33))
