"""Models with recurrent layers through the whole engine: the texts of transformers, from states in blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import LLM
from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.models.families import read_spec
from engine.setup.plan import cpu_here, make_plan
from tests.oracles.families import VOCAB, make_checkpoint, transformers_decode
from tests.oracles.hybrids import NUM_TOKENS, fill_unwritten, make_hybrid
from tests.oracles.paged_runner import decode
from tests.support.answers import greedy_answers
from tests.support.drafts import Answers
from tests.support.loaded import load

CASES = ["lfm2", "qwen3_5", "nemotron_h"]
MORE_CASES = ["lfm2_moe", "qwen3_next", "qwen3_5_moe", "granitemoehybrid", "bamba", "falcon_h1", "kimi_linear"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, Any]]:
    """Make a case once, in whichever order tests ask for it: folder, prompts, answers of transformers."""

    @functools.cache
    def make(case: str) -> tuple[Path, Any, Any]:
        folder = tmp_path_factory.mktemp("hybrid")
        return folder, *make_hybrid(case, folder)

    return make


@pytest.fixture(scope="module", params=[*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)])
def model(request: pytest.FixtureRequest, models: Callable[[str], tuple[Path, Any, Any]]) -> tuple[Path, Any, Any]:
    return models(request.param)


def start(folder: Path, **settings: Any) -> Engine:
    """An engine whose states are NaN until they are written."""
    settings = {"max_model_len": 256, "dtype": "float32", **settings}
    engine = Engine(
        EngineConfig(model=str(folder), device="cpu", skip_tokenizer_init=True, debug_checks=True, **settings)
    )
    if "prefix_cache_file" not in settings:  # from which some are
        fill_unwritten(engine.runner)
    return engine


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 7},
    "few blocks": {"max_num_batched_tokens": 50, "num_gpu_blocks_override": 30},
    "few states": {"max_num_batched_tokens": 50, "num_states_override": 8},
    "small blocks, no prefix cache": {"enable_prefix_caching": False, "block_size": 4, "max_num_batched_tokens": 19},
    "eager, large blocks": {"enforce_eager": True, "block_size": 32},
}
# All settings with one case, the hardest two with each.
BY_DEFAULT = {("qwen3_5", name) for name in SETTINGS} | {(case, n) for case in CASES for n in ("chunked", "few states")}


@pytest.mark.parametrize(
    ("model", "how"),
    [
        pytest.param(case, how, marks=() if (case, how) in BY_DEFAULT else pytest.mark.slow)
        for case in (*CASES, *MORE_CASES)
        for how in SETTINGS
    ],
    indirect=["model"],
)
def test_greedy_answers_are_those_of_transformers(model: Any, how: str) -> None:
    folder, prompts, answers = model
    settings = SETTINGS[how]
    engine = start(folder, **settings)
    for _ in range(2):
        assert greedy_answers(engine, prompts, NUM_TOKENS) == answers
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    if "num_gpu_blocks_override" in settings:
        assert stats.num_preemptions > 0
    elif "num_states_override" not in settings and settings.get("enable_prefix_caching", True):
        assert stats.prefix_hits >= 300, "prompts asked again are found"
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES])
def test_chunks_of_every_length_give_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    reference = make_checkpoint(case, tmp_path, {"max_position_embeddings": 512})
    prompts = [[(7 * i * i + 5 * n) % VOCAB for i in range(n)] for n in (131, 66, 2)]
    with torch.inference_mode():
        expected = [transformers_decode(reference, prompt, 4) for prompt in prompts]
    forced = [each.token_ids for each in expected]
    model = load(tmp_path, read_spec(tmp_path), dtype=torch.float32, device="cpu", max_model_len=256)
    for chunk in range(1, 131):
        for want, got in zip(expected, decode(model, prompts, 4, chunk=chunk, forced=forced), strict=True):
            error = (got.logits - want.logits).norm() / want.logits.norm()
            assert error <= 1e-4, f"chunks of {chunk}"


def ask(engine: Engine, prompt: list[int], num_tokens: int = 1) -> tuple[list[int], int]:
    """Return the greedy tokens, and how many of the prompt's were found in the prefix cache."""
    engine.add_request(
        EngineRequest("r", prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    )
    tokens, num_cached = [], 0
    while engine.has_work():
        for output in engine.step():
            tokens += output.new_token_ids
            num_cached = output.num_cached_tokens or num_cached
    return tokens, num_cached


def test_the_second_sighting_of_a_prompt_is_found_up_to_its_last_block(model: Any) -> None:
    folder, prompts, _ = model
    engine, longest = start(folder), prompts[6]
    for length in [32, 33, 48, 49, 131]:
        assert engine.reset_prefix_cache()
        fill_unwritten(engine.runner)
        first = ask(engine, longest[:length], 8)
        assert first[1] == 0
        assert ask(engine, longest[:length], 8) == (first[0], (length - 1) // 16 * 16)
    engine.close()


def test_the_next_turn_computes_its_own_tokens_and_a_block(model: Any) -> None:
    folder, prompts, answers = model
    engine = start(folder)
    for prompt, answer in zip(prompts[3:7], answers[3:7], strict=True):
        assert engine.reset_prefix_cache()
        for length in (14, 15, 16, 17, 31):
            tokens, _ = ask(engine, prompt, length)
            assert tokens == answer[:length]
            turn = [*prompt, *tokens, 7, 8, 9]
            _, num_cached = ask(engine, turn)
            assert num_cached == (len(turn) - 4) // 16 * 16, "all full blocks of what is computed"
    engine.close()


def test_a_prefix_that_others_leave_is_found_the_third_time(model: Any) -> None:
    folder, prompts, _ = model
    engine, prefix = start(folder), prompts[5]
    found = [ask(engine, [*prefix, *tail]) for tail in ([1] * 40, [2] * 40, [4] * 40, [5] * 40)]
    assert [num_cached for _, num_cached in found] == [0, 0, 80, 80]
    engine.close()


def test_completions_of_one_prompt_wait_for_its_state(model: Any) -> None:
    folder, prompts, answers = model
    engine = start(folder, max_num_seqs=4)
    again = [prompts[5]] * 4
    assert greedy_answers(engine, again, NUM_TOKENS) == [answers[5]] * 4
    assert engine.stats().prefix_hits == 3 * 80
    assert engine.stats().prompt_tokens == 90 + 3 * 10
    engine.close()


@pytest.mark.parametrize(
    "model", ["lfm2", *(pytest.param(case, marks=pytest.mark.slow) for case in ("qwen3_5", *MORE_CASES))], indirect=True
)
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["ranks", "stages"])
@pytest.mark.usefixtures("forked")
def test_several_ranks_answer_as_one(model: Any, ranks: dict[str, int]) -> None:
    folder, prompts, answers = model
    llm = LLM(
        str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=256, num_states_override=30,
        max_num_batched_tokens=50, num_gpu_blocks_override=40, debug_checks=True, **ranks,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == answers
    llm.close()


@pytest.mark.parametrize(
    ("truth", "enforce_eager"),
    [
        pytest.param(0.7, False, id="captured"),
        pytest.param(0.0, True, id="eager, all wrong"),
        pytest.param(0.7, True, id="eager", marks=pytest.mark.slow),
        pytest.param(0.0, False, id="captured, all wrong", marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_answer(model: Any, truth: float, enforce_eager: bool) -> None:
    folder, prompts, answers = model
    drafts = {"num_speculative_tokens": 5, "enable_adaptive_verification": False}
    engine, found = start(folder, speculative_config=drafts, enforce_eager=enforce_eager), Answers()
    found.answers = {
        (tuple(prompt), i): answer for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    }
    found.truth, policy = truth, engine.scheduler._planner.drafts
    assert policy is not None
    policy._proposer = found
    for _ in range(2):
        assert greedy_answers(engine, prompts, NUM_TOKENS) == answers
    assert policy.counts.num_draft_tokens > 100
    assert (policy.counts.num_accepted_tokens > 50) == (truth > 0)
    assert engine.stats().prefix_hits >= 300
    engine.close()


def test_a_plan_counts_states(model: Any) -> None:
    settings: dict[str, Any] = {"max_model_len": 256, "dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
    plan = make_plan(EngineConfig(model=str(model[0]), device="cpu", **settings), cpu_here())
    engine = start(model[0], **settings)
    runner, stats = engine.runner, engine.stats()
    assert (plan.num_blocks, plan.num_states) == (runner.num_blocks, runner.num_states)
    assert plan.kv_cache_bytes == runner.kv_cache_bytes <= 8 << 20
    assert plan.layout.state_bytes * plan.num_states <= (8 << 20) * 2 // 3, "two thirds of the memory at most"
    assert plan.num_requests(32) <= plan.most_by_states < plan.num_states
    assert (stats.num_states, stats.num_free_states, stats.state_usage) == (plan.num_states, plan.num_states, 0)
    assert f"{plan.num_states:,} states" in engine.summary()
    engine.close()


def test_states_of_16_bits_need_half_of_the_memory(model: Any) -> None:
    folder, prompts, answers = model
    plain, half = (start(folder, mamba_ssm_cache_dtype=dtype) for dtype in ("auto", "bfloat16"))
    runners: list[Any] = [plain.runner, half.runner]
    parts = [[part.dtype for part in cache] for cache in runners[1].forward.kv_cache if not isinstance(cache, Tensor)]
    has_states = any(len(each) > 1 for each in parts)  # beside inputs of convolutions
    assert all(each[1] == torch.bfloat16 for each in parts if len(each) > 1)
    sizes = [runner.kv_layout.state_bytes for runner in runners]
    assert (sizes[0] > sizes[1]) == has_states
    found = greedy_answers(half, prompts, NUM_TOKENS)
    same = sum(a == b for one, other in zip(found, answers, strict=True) for a, b in zip(one[:16], other, strict=False))
    assert same >= 0.8 * 16 * len(answers)
    for engine in (plain, half):
        engine.close()


def test_a_state_dtype_needs_states(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match="mamba_ssm_cache_dtype 'float16' needs a model with recurrent layers"):
        start(tmp_path, mamba_ssm_cache_dtype="float16")


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({}, id="alone"),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow, id="two stages"),
    ],
)
@pytest.mark.usefixtures("forked")
def test_a_restart_finds_prefixes_with_their_states(model: Any, tmp_path: Path, parallel: dict[str, int]) -> None:
    folder, prompts, _ = model
    prompt = max(prompts, key=len)
    file, found = tmp_path / "cache", []
    for _ in range(2):
        engine = start(folder, prefix_cache_file=str(file), **parallel)
        found.append(ask(engine, prompt))
        engine.close()
    assert found[0][1] == 0
    assert found[1] == (found[0][0], (len(prompt) - 1) // 16 * 16), "all but the last block"
    suffix = ".rank0" if parallel else ""
    assert {f"cache{suffix}", f"cache.states{suffix}"} <= {path.name for path in tmp_path.iterdir()}
    next(tmp_path.glob(f"cache.states{suffix}")).unlink()
    engine = start(folder, prefix_cache_file=str(file), **parallel)
    assert ask(engine, prompt) == found[0], "no prefix is found without its states"
    engine.close()
