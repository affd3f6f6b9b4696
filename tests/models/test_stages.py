"""Pipeline parallelism: stages that each hold some layers compute what the whole model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.attention import AttentionMetadata
from engine.models.decoder import Decoder
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.quantization import choose_quantization
from engine.models.shard import Shard, Stage
from engine.models.weights import checkpoint_tensors
from tests.models.test_shard import NUM_TOKENS, load, logits, on_ranks
from tests.oracles.families import CASES, make_checkpoint, make_prompts
from tests.oracles.paged_runner import decode


class Chain:
    """Stages one after the other, as one model."""

    def __init__(self, stages: Sequence[Decoder]) -> None:
        self.stages, self.spec = stages, stages[0].spec
        self.embed_tokens, self.logits = stages[0].embed_tokens, stages[-1].logits

    def __call__(
        self, input_ids: Tensor, positions: Tensor, kv_cache: Sequence[Tensor], attention: Sequence[AttentionMetadata]
    ) -> Tensor:
        hidden = None
        for stage in self.stages:
            own = slice(stage.own_layers.start, stage.own_layers.stop)
            hidden = stage(input_ids, positions, kv_cache[own], attention[own], hidden)
        assert hidden is not None
        return hidden


def chain(folder: Path, count: int, **options: Any) -> Any:
    stages = [load(folder, stage=Stage(index, count), **options) for index in range(count)]
    for stage in stages:
        stage.pack_weights()
    return Chain(stages)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"gemma4_small", "gemma3n"}))
def test_two_stages_equal_the_model(tmp_path: Path, name: str) -> None:
    make_checkpoint(name, tmp_path)
    whole = load(tmp_path)
    whole.pack_weights()
    prompts = make_prompts()[:2]
    expected, got = (decode(model, prompts, 3, chunk=11) for model in (whole, chain(tmp_path, 2)))
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    assert torch.equal(logits(got), logits(expected))


@pytest.mark.parametrize(("name", "method"), [("llama-biases", None), ("qwen2", "int4")])
def test_each_stage_has_random_weights(tmp_path: Path, name: str, method: str | None) -> None:
    make_checkpoint(name, tmp_path)
    spec = read_spec(tmp_path)
    spec = replace(spec, quantization=choose_quantization(spec.quantization, method, rounds_head=True))
    stages = chain(tmp_path, 2, spec=spec, load_format="dummy")
    assert logits(decode(stages, make_prompts()[:1], 1)).std() > 0


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "deepseek_v3"])
def test_ranks_of_stages_equal_the_model(tmp_path: Path, name: str) -> None:
    make_checkpoint(name, tmp_path)
    prompts = make_prompts()
    expected = decode(load(tmp_path), prompts, NUM_TOKENS, chunk=11)
    forced = [each.token_ids for each in expected]

    def work(shard: Shard, communicator: Any) -> Tensor:
        model = chain(tmp_path, 2, shard=shard, communicator=communicator)
        return logits(decode(model, prompts, NUM_TOKENS, chunk=11, forced=forced, expands=True))

    for got in on_ranks(2, work):
        assert (got - logits(expected)).abs().max() <= 3e-5


@pytest.mark.parametrize(("name", "tied"), [("qwen2", True), ("llama-biases", False)])
def test_each_stage_has_memory_for_its_layers_only(tmp_path: Path, name: str, tied: bool) -> None:
    make_checkpoint(name, tmp_path)
    whole = checkpoint_tensors(load(tmp_path))
    stages = [checkpoint_tensors(load(tmp_path, stage=Stage(index, 2))) for index in range(2)]
    for tensor_name, tensor in whole.items():
        held = [not stage[tensor_name].memory.is_meta for stage in stages]
        if "embed_tokens" in tensor_name:
            assert held == [True, tied], "the head is the embedding"
        elif "lm_head" in tensor_name:
            assert held == [tied, True]
        elif tensor_name == "model.norm.weight":
            assert held == [False, True]
        else:
            assert sum(held) == 1, tensor_name
        for stage, is_held in zip(stages, held, strict=True):
            assert not is_held or torch.equal(stage[tensor_name].memory, tensor.memory)


def test_layers_are_divided_evenly() -> None:
    assert [list(Stage(index, 3).layers(7)) for index in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    with pytest.raises(ModelError, match=r"'num_hidden_layers' \(2\) cannot be divided among 3 stages"):
        Stage(0, 3).layers(2)
