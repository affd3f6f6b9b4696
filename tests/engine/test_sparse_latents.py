"""Sparse attention over latents through the whole engine: the texts of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from kernels import FORMS
from tests.oracles.families import make_checkpoint, make_prompts, transformers_tokens
from tests.support.answers import greedy_answers

LENGTH = 32


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A random model, prompts (two begin alike), and transformers' greedy answers."""
    FORMS.choose(False)  # the last engine of the model before was deterministic
    folder = tmp_path_factory.mktemp("sparse")
    oracle = make_checkpoint(request.param, folder)
    prompts = make_prompts()
    prompts.append([*prompts[2][:40], 7, 8, 9])
    return folder, prompts, transformers_tokens(oracle, folder, prompts, LENGTH)


def config(folder: Path, **settings: Any) -> EngineConfig:
    shape = {"max_model_len": 160, "block_size": 8, "debug_checks": True, "skip_tokenizer_init": True}
    return EngineConfig(model=str(folder), device="cpu", **{**shape, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 22},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "max_num_batched_tokens": 24},
        {"deterministic": True, "max_num_batched_tokens": 24},
        {"deterministic": True, "tensor_parallel_size": 2},
        {"kv_offloading_size": 0.01, "num_gpu_blocks_override": 30},
        {"speculative_config": {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}},
    ],
    ids=[
        "plain",
        "chunked",
        "little memory",
        "ranks",
        "stages",
        "deterministic",
        "deterministic ranks",
        "host tier",
        "drafts",
    ],
)
@pytest.mark.usefixtures("forked")
def test_greedy_answers_are_those_of_transformers(model: Any, settings: dict[str, Any]) -> None:
    folder, prompts, answers = model
    engine = Engine(config(folder, **settings))
    for _ in range(2):
        assert greedy_answers(engine, prompts, LENGTH) == answers
    stats = engine.stats()
    if "num_gpu_blocks_override" in settings:
        assert stats.num_preemptions > 0
    else:
        assert stats.prefix_hits >= 100, "prompts asked again are found"
    engine.close()


def test_prefixes_from_a_file(model: Any, tmp_path: Path) -> None:
    """The indexer's keys come back with the latents."""
    folder, prompts, answers = model
    for is_found in (False, True):
        engine = Engine(config(folder, prefix_cache_file=str(tmp_path / "prefixes")))
        assert greedy_answers(engine, prompts, LENGTH) == answers
        assert (engine.stats().prefix_hits > 60) is is_found
        engine.close()
