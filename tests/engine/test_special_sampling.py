"""Penalties, bans and rare samplers through the whole engine: the same answer whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.processing.input_processor import InputProcessor

SPECIAL: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5, "temperature": 0},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "temperature": 0},
    {"frequency_penalty": -2, "seed": 5},
    {"logit_bias": {7: 20.0, 8: 20.5}, "seed": 6},
    {"allowed_token_ids": list(range(30, 60)), "seed": 7, "presence_penalty": 0.5},
    {"bad_words": [[i] for i in range(100)] + [[200, 201], "ab"], "seed": 8},
    {"min_tokens": 20, "logit_bias": {257: 100}, "seed": 9},
    {"dry_multiplier": 2.0, "logit_bias": {1: 12, 2: 12}, "seed": 10},
    {"xtc_probability": 0.7, "xtc_threshold": 0.02, "seed": 11},
    {"typical_p": 0.4, "top_n_sigma": 2.0, "seed": 12},
    {"thinking_token_budget": 6, "thinking_marks": (-1, 33), "logit_bias": {33: -100}, "seed": 14},
    {"thinking_token_budget": 3, "thinking_marks": (7, 33), "logit_bias": {7: 100, 33: -100}, "seed": 15},
    {"seed": 13},
    {"temperature": 0},
]


def answers(model: Path, jobs: list[tuple[list[int], SamplingParams]], **settings: Any) -> list[list[int]]:
    config = EngineConfig(model=str(model), device="cpu", max_model_len=256, **settings)
    input_processor = InputProcessor.load(config)
    engine = Engine(config)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(jobs))}
    for i, (prompt, params) in enumerate(jobs):
        engine.add_request(input_processor.check(EngineRequest(str(i), prompt, params)))
    while engine.has_work():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    engine.scheduler.check()
    if "num_gpu_blocks_override" in settings:
        assert engine.stats().num_preemptions >= 5
    engine.close()
    return list(tokens.values())


def checked(input_processor: InputProcessor, sampling: SamplingParams) -> SamplingParams:
    return input_processor.check(EngineRequest("a", [1], sampling)).sampling


@pytest.fixture(scope="module")
def jobs() -> list[tuple[list[int], SamplingParams]]:
    prompts = [[(i * 37 + k * k) % 250 for k in range(20 + 5 * i)] for i in range(len(SPECIAL))]
    return [(prompt, SamplingParams(max_tokens=60, **p)) for prompt, p in zip(prompts, SPECIAL, strict=True)]


@pytest.fixture(scope="module")
def alone(tiny_model: Path, jobs: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    return answers(tiny_model, jobs, max_num_seqs=1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 24},
        {"num_gpu_blocks_override": 64, "block_size": 4, "max_num_batched_tokens": 100},
        {"max_num_seqs": 3, "enable_prefix_caching": False},
    ],
)
def test_same_answers_in_any_company(
    tiny_model: Path,
    jobs: list[tuple[list[int], SamplingParams]],
    alone: list[list[int]],
    settings: dict[str, Any],
) -> None:
    assert answers(tiny_model, jobs, **settings) == alone


def test_answers_are_what_was_asked(alone: list[list[int]]) -> None:
    assert len(set(alone[1])) > len(alone[1]) * 0.8  # penalties
    assert set(alone[3]) & {7, 8}
    assert set(alone[4]) <= set(range(30, 60))
    assert min(alone[5]) >= 100
    assert all((a, b) != (200, 201) for a, b in zip(alone[5], alone[5][1:], strict=False))
    assert len(alone[6]) == 21  # the end comes after 20
    assert alone[6][-1] == 257


def test_texts_become_tokens_in_the_front_end(tiny_model: Path) -> None:
    input_processor = InputProcessor.load(EngineConfig(model=str(tiny_model), device="cpu"))
    tokenizer = input_processor.tokenizer
    assert tokenizer is not None
    encode = tokenizer.encode
    params = checked(input_processor, SamplingParams(bad_words=["ab", [5, 6], " ab"], dry_multiplier=1))
    assert params.bad_words == [encode("ab"), encode(" ab"), [5, 6]]
    assert params.dry_sequence_breakers == [encode(text)[0] for text in ("\n", ":", '"', "*")]
    params = checked(input_processor, SamplingParams(dry_sequence_breakers=["x"], dry_multiplier=1))
    assert params.dry_sequence_breakers == encode("x")
    assert checked(input_processor, SamplingParams(dry_sequence_breakers=["x"])).dry_sequence_breakers is None
    plain = SamplingParams()
    assert checked(input_processor, plain) == plain
    for fields in ({"logit_bias": {300: 1}}, {"allowed_token_ids": [300]}, {"bad_words": [[1, 300]]}):
        with pytest.raises(ValueError, match=f"{next(iter(fields))} must be below 300, got 300"):
            checked(input_processor, SamplingParams(**fields))  # type: ignore[arg-type]
    bare = InputProcessor.load(EngineConfig(model=str(tiny_model), device="cpu", skip_tokenizer_init=True))
    assert checked(bare, SamplingParams(dry_multiplier=1)).dry_sequence_breakers is None
    with pytest.raises(ValueError, match="bad_words: texts need a tokenizer"):
        checked(bare, SamplingParams(bad_words=["ab"]))


@pytest.mark.parametrize(
    ("params", "ends"),
    [
        ({"thinking_marks": (-1, 33)}, [6]),  # the prompt ends inside the reasoning
        ({"thinking_marks": (7, 33), "logit_bias": {7: 100, 33: -100}}, [7]),  # its first token begins it
        ({"thinking_marks": (7, 33), "logit_bias": {7: -100, 33: -100}}, []),  # there is none
        ({"thinking_marks": (-1, 33), "thinking_token_budget": 0}, [0]),
    ],
)
def test_a_thinking_budget_ends_the_reasoning_once(tiny_model: Path, params: dict[str, Any], ends: list[int]) -> None:
    defaults = {"thinking_token_budget": 6, "logit_bias": {33: -100}, "max_tokens": 30, "ignore_eos": True, "seed": 1}
    (tokens,) = answers(tiny_model, [([1, 33, 7], SamplingParams(**{**defaults, **params}))])
    assert [at for at, token in enumerate(tokens) if token == 33] == ends


def test_a_thinking_budget_needs_the_marks(tiny_model: Path) -> None:
    input_processor = InputProcessor.load(EngineConfig(model=str(tiny_model), device="cpu", max_model_len=256))
    with pytest.raises(ValueError, match="needs thinking_marks"):
        checked(input_processor, SamplingParams(thinking_token_budget=5))
