"""Families with switches of their own through the whole engine: transformers' texts, also after a prefix hit."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from tests.oracles.families import CASES, MORE_WITH_IMAGES, make_checkpoint, make_prompts, transformers_tokens
from tests.support.answers import greedy_answers

LENGTH = 64
FAMILIES = {
    "gpt2": "learnt positions, transposed matrices",
    "ministral3": "queries scaled by their positions",
    "hunyuan_v1_dense": "norms after RoPE",
    "phimoe": "SparseMixer, a bias of the head",
    "llama4": "experts whose input is scaled",
}


def check(name: str, folder: Path) -> None:
    oracle = make_checkpoint(name, folder)
    prompts = make_prompts()
    prompts.append([*prompts[2][:40], 7, 8, 9])
    expected = transformers_tokens(oracle, folder, prompts, LENGTH)
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        skip_tokenizer_init=True,
        debug_checks=True,
        max_model_len=140,
        block_size=8,
        max_num_batched_tokens=16,
    )
    engine = Engine(config)
    try:
        for _ in range(2):
            assert greedy_answers(engine, prompts, LENGTH) == expected
        assert engine.stats().prefix_hits >= 100, "prompts asked again are found"
    finally:
        engine.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() | MORE_WITH_IMAGES.keys()))
def test_every_family(name: str, tmp_path: Path) -> None:
    if name == "llama-dynamic":
        pytest.skip("transformers stretches the keys in its cache, too")
    check(name, tmp_path)
