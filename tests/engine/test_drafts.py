"""Drafts change no answer: whatever is proposed, each request gets the tokens that it gets without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.core.batch import SchedulerOutput
from engine.core.drafts.policy import DraftPolicy
from engine.core.drafts.proposer import Proposal
from engine.core.engine_request import EngineRequest
from engine.core.params.structured import StructuredOutputs
from tests.support.drafts import Answers

PROMPTS = [[5, 9, 77, 5, 9], [30, 31, 32], [200, 7, 7, 7], [4] * 20, list(range(40, 60))]
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "block_size": 8, "debug_checks": True,
    "speculative_config": {"num_speculative_tokens": 5, "enable_adaptive_verification": False, "prompt_lookup_min": 2},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"temperature": 1.0},
    "filters": {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "dry": {"temperature": 0.7, "dry_multiplier": 0.8},
    "min_tokens": {"temperature": 0, "min_tokens": 20, "stop_token_ids": list(range(100))},
    "bad words": {"temperature": 0, "bad_words": [[17], [5, 9]]},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.001, "typical_p": 0.9, "top_n_sigma": 2.0},
    "logit bias": {"logit_bias": {13: 3.0}},
    "log-probabilities": {"temperature": 0.9, "logprobs": 3},
    "several": {"temperature": 1.0, "n": 3},
    "stop strings": {"temperature": 0, "stop": ["a", "e"]},
    "grammar": {"structured_outputs": StructuredOutputs(regex='(the same|[a-f]{3,9}) (yes|no), "[0-9]{4}" and on')},
    "grammar, log-probabilities": {
        "structured_outputs": StructuredOutputs(choice=["a certain end", "a choice"]),
        "logprobs": 1,
    },
    "grammar, min_tokens": {"structured_outputs": StructuredOutputs(regex="[a-f]{1,90}"), "min_tokens": 7},
}  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["kernel by kernel", "captured"])
def llm(request: pytest.FixtureRequest, tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), enforce_eager=request.param, **SETTINGS)


def answers(llm: LLM, params: SamplingParams) -> list[Any]:
    llm.reset_prefix_cache()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_answers_with_and_without_drafts(llm: LLM, kind: str) -> None:
    params = SamplingParams(**{"max_tokens": 40, "seed": 6, **KINDS[kind]})
    scheduler = llm._engine.scheduler
    policy = scheduler._planner.drafts
    assert isinstance(policy, DraftPolicy)
    guided, found = policy._proposer, Answers()
    scheduler._planner.drafts = None
    expected = answers(llm, params)
    scheduler._planner.drafts = policy
    keys = [(tuple(ids), 6 + i) for ids in PROMPTS for i in range(params.n)]
    found.answers = {key: list(completion.token_ids) for key, completion in zip(keys, expected, strict=True)}
    counts = policy.counts
    try:
        for truth in (0.0, 0.8, None):
            if truth is not None:
                found.truth, policy._proposer = truth, found
            else:  # forced tokens and lookup
                policy._proposer = guided
            tried, accepted = counts.num_draft_tokens, counts.num_accepted_tokens
            got = answers(llm, params)
            tried, accepted = counts.num_draft_tokens - tried, counts.num_accepted_tokens - accepted
            for a, b in zip(expected, got, strict=True):
                assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
                if params.logprobs is not None:
                    assert len(b.logprobs) == len(b.token_ids)
                    for one, other in zip(a.logprobs, b.logprobs, strict=True):
                        assert one.keys() == other.keys()
                        assert [v.logprob for v in one.values()] == pytest.approx(
                            [v.logprob for v in other.values()], abs=1e-4
                        )
            if truth is not None:
                assert tried, "there were drafts"
                assert (accepted > tried / 5) == (truth > 0.5), (tried, accepted)
            elif params.structured_outputs is not None and "min_tokens" not in kind:
                assert accepted >= 5, "of forced tokens"
    finally:
        policy._proposer = guided


def test_a_predicted_answer_comes_in_fewer_steps_and_a_wrong_one_changes_nothing(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), **SETTINGS)
    params, prompt = (
        SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True),
        {"prompt_token_ids": [7, 9]},
    )
    counts = llm._engine.scheduler.stats
    [answer] = llm.generate([prompt], params, use_tqdm=False)
    right = list(answer.outputs[0].token_ids)
    for prediction, accepted in ((right, 40), ([*right[:20], 3, *right[20:]], 30), ([8] * 60, 0), ([], 0)):
        before = counts().num_accepted_tokens
        [again] = llm.generate([prompt], params.clone(prediction=prediction), use_tqdm=False)
        assert list(again.outputs[0].token_ids) == right
        assert counts().num_accepted_tokens - before >= accepted
        assert again.metrics is not None
        assert again.metrics.num_predicted[0] >= accepted
        assert again.metrics.num_drafted[1] >= again.metrics.num_drafted[0] >= accepted
    with pytest.raises(ValueError, match="prediction must have token ids from 0 to"):
        llm.generate([prompt], params.clone(prediction=[10**6]), use_tqdm=False)
    with pytest.raises(ValueError, match="prediction must be a text or a list of token ids"):
        params.clone(prediction=3)
    llm.close()


def test_earlier_answers_are_guessed_and_imposed_acceptance_keeps_drafts(tiny_model: Path) -> None:
    plain = {**SETTINGS, "speculative_config": {"num_speculative_tokens": 0}}
    params, prompts = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), [{"prompt_token_ids": [7, 9]}]
    llm = LLM(str(tiny_model), **plain)
    [answer] = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    llm = LLM(
        str(tiny_model),
        **{**SETTINGS, "speculative_config": {"method": "suffix", "enable_adaptive_verification": False}},
    )
    accepted = list[int]()
    for _ in range(3):
        [again] = llm.generate(prompts, params, use_tqdm=False)
        assert again.outputs[0].token_ids == answer.outputs[0].token_ids
        assert again.metrics is not None
        accepted.append(again.metrics.num_drafted[0])
    assert accepted[1] > accepted[0] + 9, "what was answered before"
    llm.close()
    imposed = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0, "num_speculative_tokens": 4}
    settings = {**imposed, "enable_adaptive_verification": False}
    llm = LLM(str(tiny_model), **{**SETTINGS, "speculative_config": settings})
    llm.generate([{"prompt_token_ids": [i, 9]} for i in range(8)], params.clone(max_tokens=100), use_tqdm=False)
    stats = llm._engine.scheduler.stats()
    assert 1 + stats.num_accepted_tokens / stats.num_drafts == pytest.approx(3.0, abs=0.3)
    llm.close()


class _OnDevice:
    """A step that has not ended when it is launched, as on an accelerator."""

    has_ended = False

    def __init__(self, handle: Any) -> None:
        result = handle.read()  # before another step overwrites it
        self.read, self.guided = lambda: result, handle.guided


def test_the_next_step_is_launched_before_the_tokens_of_drafts_are_returned(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    expected = LLM(str(tiny_model), **SETTINGS).generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    engine = LLM(str(tiny_model), **SETTINGS)._engine
    launch, steps_with_drafts = engine.runner.launch, list[bool]()

    def launched(output: SchedulerOutput) -> Any:
        steps_with_drafts.append(bool(output.drafts))
        return _OnDevice(launch(output))

    monkeypatch.setattr(engine.runner, "launch", launched)
    for i, ids in enumerate(PROMPTS):
        engine.add_request(EngineRequest(f"{i}", ids, params))
    found: dict[str, list[int]] = {f"{i}": [] for i in range(len(PROMPTS))}
    while engine.has_work():
        for output in engine.step():
            found[output.request_id] += output.new_token_ids
        assert engine.in_flight or not engine.scheduler.queues.running, "the device waits for the CPU"
    assert [*found.values()] == [list(each.outputs[0].token_ids) for each in expected]
    assert sum(steps_with_drafts) > 3


class _Always:
    """Proposes the same token always."""

    def __init__(self, token: int) -> None:
        self._token = token

    def start(self, request: EngineRequest) -> _Always:
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        return Proposal([self._token] * min(most, 2))


def test_tokens_have_the_models_distribution_with_drafts(tiny_model: Path) -> None:
    """χ² of three successive tokens, with other seeds than without drafts: rejection sampling loses nothing."""
    llm = LLM(str(tiny_model), **{**SETTINGS, "max_num_seqs": 64, "debug_checks": False})
    scheduler = llm._engine.scheduler
    policy = scheduler._planner.drafts
    assert policy is not None
    tokens, num_answers = [11, 90, 200], 1500
    params = SamplingParams(max_tokens=5, ignore_eos=True, allowed_token_ids=tokens, detokenize=False)
    policy._proposer = _Always(tokens[1])
    found = list[Counter[tuple[int, ...]]]()
    for drafts in (None, policy):
        scheduler._planner.drafts = scheduler._steps._drafts = drafts
        first = len(found) * num_answers
        each = [params.clone(seed=first + i) for i in range(num_answers)]
        outputs = llm.generate([{"prompt_token_ids": [7, 9]}] * num_answers, each, use_tqdm=False)
        found.append(Counter(tuple(output.outputs[0].token_ids[1:4]) for output in outputs))
    counts, (plain, drafted) = policy.counts, found
    assert 200 < counts.num_accepted_tokens < counts.num_draft_tokens - 200
    cells = plain.keys() | drafted.keys()
    statistic = sum((plain[key] - drafted[key]) ** 2 / (plain[key] + drafted[key]) for key in cells)
    degrees = len(cells) - 1
    assert 15 < degrees <= 26
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5, "one in some ten thousand, if the distributions are equal"
    llm.close()
