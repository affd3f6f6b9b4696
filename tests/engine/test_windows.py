"""Layers with a sliding window through the whole engine: the texts of transformers, from a cache that forgets the
past.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from tests.oracles.windowed import LENGTH, MODELS, make_windowed
from tests.support.answers import greedy_answers

FEW_BLOCKS = {"every layer": 10, "every other layer": 38, "three of four layers": 52}  # enough for one long request


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, int]:
    """A random model, prompts (two begin alike), transformers' greedy answers, and how many blocks are few."""
    folder = tmp_path_factory.mktemp("windowed")
    prompts, answers = make_windowed(request.param, folder)
    return folder, prompts, answers, FEW_BLOCKS[request.param]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "little_memory": True},
        {"enable_prefix_caching": False, "block_size": 4},
    ],
    ids=["plain", "chunked", "chunked, little memory", "small blocks, no prefix cache"],
)
def test_greedy_answers_are_those_of_transformers(model: Any, settings: dict[str, Any]) -> None:
    folder, prompts, answers, few_blocks = model
    settings = {"max_model_len": 200, "block_size": 8, **settings}
    if little_memory := settings.pop("little_memory", False):
        settings["num_gpu_blocks_override"] = few_blocks
    engine = Engine(
        EngineConfig(model=str(folder), device="cpu", skip_tokenizer_init=True, debug_checks=True, **settings)
    )
    for _ in range(2):
        assert greedy_answers(engine, prompts, LENGTH) == answers
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    if little_memory:
        assert stats.num_preemptions > 0
    elif settings.get("enable_prefix_caching", True):
        assert stats.prefix_hits >= 100, "prompts asked again are found"
    engine.close()


def test_more_requests_fit_the_same_cache(model: Any) -> None:
    """A window's blocks are given back: the same blocks hold more tokens than without one."""
    folder = model[0]
    config = EngineConfig(
        model=str(folder), device="cpu", skip_tokenizer_init=True, max_model_len=256, block_size=4,
        max_num_batched_tokens=8, num_gpu_blocks_override=100,
    )  # fmt: skip
    engine = Engine(config)
    without = engine.runner.num_blocks * 4 // len(engine.runner.cache_groups)
    assert engine.scheduler.blocks.capacity(256) > 1.3 * without
    engine.close()
