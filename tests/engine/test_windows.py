"""Layers with a sliding window through the whole engine: the texts of transformers, from a cache that forgets the past."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen3Config

from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine

WINDOW, LENGTH = 24, 60
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 200,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS = {
    "every layer": MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=WINDOW),
    "every other layer": Qwen3Config(
        **SIZES,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "three of four layers": Qwen3Config(
        **SIZES,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    ),
}


FEW_BLOCKS = {"every layer": 10, "every other layer": 38, "three of four layers": 52}  # enough for one long request


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, int]:
    """A random model, prompts of which two begin alike, transformers' greedy answers, and how many blocks are few."""
    config: PreTrainedConfig = MODELS[request.param]
    folder = tmp_path_factory.mktemp("windowed")
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    oracle.save_pretrained(folder)
    rng = random.Random(1)
    prompts = [[rng.randrange(200) for _ in range(n)] for n in (3, 30, 77, 100)]
    prompts.append([*prompts[3][:70], 7, 8, 9])
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(LENGTH):  # without its cache, whose windows are off by some tokens in transformers 5.17
            logits = oracle(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
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
        EngineConfig(model=str(folder), device="cpu", skip_tokenizer_init=True, debug_checks=True, **settings),
        progress=False,
    )
    for again in range(2):
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
            engine.add_request(EngineRequest(f"{again}-{i}", prompt, sampling))
        found: dict[str, list[int]] = {}
        while engine.has_work():
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
        assert [found[f"{again}-{i}"] for i in range(len(prompts))] == answers
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
    engine = Engine(config, progress=False)
    without = engine.runner.num_blocks * 4 // len(engine.runner.cache_groups)
    assert engine.scheduler.blocks.capacity(256) > 1.3 * without
    engine.close()
