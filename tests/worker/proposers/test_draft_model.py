"""Draft models: guesses are those of the model alone, always right if it is the target itself; texts stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine import LLM, ConfigError, EngineConfig, SamplingParams
from engine.setup.plan import cpu_here, make_plan
from engine.worker.model_runner import ModelRunner
from engine.worker.proposers import draft_model
from tests.support.drafters import PROMPTS, SETTINGS, Drafted
from tests.support.tiny_model import write_model

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"temperature": 1.0},
    "filters": {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
}
PENALTIES: dict[str, Any] = {"temperature": 0.7, "repetition_penalty": 1.3, "logprobs": 1, "n": 2}


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 6, "ignore_eos": True, "detokenize": False, **fields})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with one of its layers, and other weights in its head."""
    folder = write_model(tmp_path_factory.mktemp("draft") / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "sliding_window": 8}))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if ".layers.1." not in name}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def itself(tiny_model: Path) -> Drafted:
    return Drafted(tiny_model, "draft_model", tiny_model, num=4)


@pytest.fixture(scope="module")
def drafted(tiny_model: Path, small: Path) -> Drafted:
    return Drafted(tiny_model, "draft_model", small, num=4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_drafts_for_itself_is_always_right(itself: Drafted, kind: str) -> None:
    expected, before = itself.answers(params(**KINDS[kind]), drafts=False), itself.counts
    itself.llm.reset_prefix_cache()
    assert itself.answers(params(**KINDS[kind])) == expected
    tried, accepted = (after - earlier for after, earlier in zip(itself.counts, before, strict=True))
    assert tried == accepted > 80


def test_drafts_are_those_of_the_draft_model_alone(drafted: Drafted, small: Path) -> None:
    expected = drafted.answers(params(temperature=0), drafts=False)
    drafted.llm.reset_prefix_cache()
    drafted.proposed.clear()
    assert drafted.answers(params(temperature=0)) == expected
    alone = LLM(str(small), **SETTINGS)
    compared = drafted.proposed[::6]
    assert len(compared) > 10
    given = [{"prompt_token_ids": known} for known, _ in compared]
    outputs = alone.generate(given, params(temperature=0, max_tokens=4), use_tqdm=False)
    for output, (_, proposed) in zip(outputs, compared, strict=True):
        assert list(output.outputs[0].token_ids)[: len(proposed)] == proposed
    assert sum(len(proposed) == 4 for _, proposed in compared) > 8, "but at the end of answers"
    alone.close()


@pytest.mark.parametrize("fields", [*KINDS.values(), PENALTIES], ids=[*KINDS, "penalties"])
def test_texts_are_those_without_drafts(drafted: Drafted, fields: dict[str, Any]) -> None:
    expected, before = drafted.answers(params(**fields), drafts=False), drafted.counts
    drafted.llm.reset_prefix_cache()
    assert drafted.answers(params(**fields)) == expected
    assert drafted.counts[0] > before[0]
    assert drafted.answers(params(**fields)) == expected, "of a cached prefix"


def test_tokens_of_steps_without_proposals_are_computed_later(itself: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy asks for proposals in one step of nine: what is proposed then is right all the same."""
    policy, counts, num = itself.policy, itself.counts, [0]

    def now_and_then(num_seqs: int) -> int:
        num[0] += 1
        return 4 if num[0] % 9 == 0 else 0

    expected = itself.answers(params(), drafts=False)
    itself.llm.reset_prefix_cache()
    monkeypatch.setattr(policy, "num_proposals", now_and_then)
    assert itself.answers(params()) == expected
    tried, accepted = (after - earlier for after, earlier in zip(itself.counts, counts, strict=True))
    assert tried == accepted > 10


def test_a_model_that_lags_far_behind_is_left_there(itself: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
    """It catches up on few tokens, and proposes nothing for a request of which it has missed more."""
    expected, num = itself.answers(params(), drafts=False), [0]

    def late(num_seqs: int) -> int:
        num[0] += 1
        return 4 if num[0] % 9 == 0 else 0

    monkeypatch.setattr(itself.policy, "num_proposals", late)
    for lag, proposes in ((3, False), (96, True)):
        monkeypatch.setattr(draft_model, "MAX_LAG", lag)
        itself.llm.reset_prefix_cache()
        itself.proposed.clear()
        assert itself.answers(params(), prompts=PROMPTS[:2]) == expected[:2]
        assert any(tokens for _, tokens in itself.proposed) == proposes


def test_preempted_requests_and_few_blocks(tiny_model: Path, small: Path) -> None:
    many = [[7 * i + j for j in range(20)] for i in range(4)]
    for draft in (small, tiny_model):
        few = Drafted(tiny_model, "draft_model", draft, num=4, num_gpu_blocks_override=14, max_model_len=96)
        expected = few.answers(params(max_tokens=40), drafts=False, prompts=many)
        few.llm.reset_prefix_cache()
        assert few.answers(params(max_tokens=40), prompts=many) == expected
        assert few.llm._engine.scheduler.stats().num_preemptions > 0
        assert few.counts[1] > 0
        few.llm.close()


def test_models_that_cannot_draft_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    def refused(message: str, **changes: Any) -> None:
        given = {"method": "draft_model", "model": str(tmp_path)}
        with pytest.raises(ConfigError, match=message):
            LLM(str(tiny_model), **SETTINGS | changes, speculative_config=given)

    write_model(tmp_path)
    refused("cannot be used with pipeline_parallel_size", pipeline_parallel_size=2)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["!"], tokenizer["model"]["vocab"]['"'] = 1, 0
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused("must have the vocabulary of the target: '!' is not the same token")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 299}))
    refused("must have the vocabulary of the target, of 300 tokens; it has 299")
    with pytest.raises(ConfigError, match="method mtp needs a checkpoint with prediction layers: LlamaForCausalLM"):
        LLM(str(tiny_model), **SETTINGS, speculative_config={"method": "mtp"})


def test_a_plan_counts_the_drafter_as_the_engine_does(drafted: Drafted, tiny_model: Path, small: Path) -> None:
    given = {"method": "draft_model", "model": str(small)}
    config = EngineConfig(str(tiny_model), device="cpu", dtype="float32", block_size=8, speculative_config=given)
    plan, runner = make_plan(config, cpu_here()), drafted.llm._engine.runner
    assert isinstance(runner, ModelRunner)
    stored = load_file(small / "model.safetensors").values()
    assert plan.drafter == sum(4 * tensor.numel() for tensor in stored)
    assert plan.layout.memory_of_block == runner.kv_layout.memory_of_block == 8 * 3 * 2 * 2 * 16 * 4
    assert plan.num_blocks * plan.layout.memory_of_block == plan.kv_cache_bytes
