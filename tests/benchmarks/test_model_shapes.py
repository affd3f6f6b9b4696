"""Every shape is a model that Quire reads and builds, and weighs what its name says."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from benchmarks.model_shapes import SHAPES
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
    model = decoder_of_shapes(read_spec(tmp_path), torch.bfloat16, tmp_path)
    count = sum(each.numel() for each in itertools.chain(model.parameters(), model.buffers()))
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.04)
