"""Log-probabilities of prompts: the model's own, however the prompt was cut, and those of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.params.sampling import SamplingParams
from engine.offline.llm import LLM
from engine.processing.output_collector import RequestOutput, with_samples

PROMPTS = [[(i * 31 + k * k * 7) % 250 for k in range(n)] for i, n in enumerate((1, 2, 15, 16, 17, 90, 33))]
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, ignore_eos=True)


def make(model: Path, **settings: Any) -> LLM:
    return LLM(model=str(model), device="cpu", max_model_len=256, **settings)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[torch.Tensor]:
    """[tokens, vocabulary] of each prompt, from the decoder over the whole prompt at once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in PROMPTS]


def check(results: list[RequestOutput], expected: list[torch.Tensor]) -> None:
    for prompt, result, table in zip(PROMPTS, results, expected, strict=True):
        found = result.prompt_logprobs
        assert found is not None
        assert len(found) == len(prompt)
        assert found[0] is None
        for position, token in enumerate(prompt[1:], 1):
            at, row = found[position], table[position - 1]
            assert at is not None
            assert at[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert at[token].rank == int((row > row[token]).sum()) + 1
            best = row.topk(2)
            assert set(at) == {token, *best.indices.tolist()}
            for top, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                assert at[top].logprob == pytest.approx(value, abs=1e-3)
            assert at[token].decoded_token is not None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"num_gpu_blocks_override": 64, "block_size": 4, "max_num_batched_tokens": 50},
        {"enable_prefix_caching": False},
    ],
)
def test_however_prompts_are_cut(
    tiny_model: Path, expected: list[torch.Tensor], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.sampling.logprobs.MAX_ELEMENTS", 300 * 6)  # six positions at a time
    llm = make(tiny_model, **settings)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    sampling = [SCORED] * len(prompts)
    if "block_size" in settings:
        prompts += [{"prompt_token_ids": [9] * 30}] * 3
        sampling += [SamplingParams(max_tokens=150, ignore_eos=True)] * 3
    for _ in range(2):  # the second time all is in the prefix cache
        results = llm.generate(prompts, sampling, use_tqdm=False)
        check(results[: len(PROMPTS)], expected)
        assert all(result.prompt_logprobs is None for result in results[len(PROMPTS) :])
        assert all(result.num_cached_tokens == 0 for result in results[: len(PROMPTS)])
    assert ("block_size" in settings) == (llm._engine.stats().num_preemptions > 0)
    plain = llm.generate(prompts[5], SCORED.clone(prompt_logprobs=None), use_tqdm=False)[0]
    assert plain.outputs[0].token_ids == results[5].outputs[0].token_ids
    assert settings or plain.num_cached_tokens > 0
    llm.close()


def test_one_answer_of_several_scores_the_prompt(tiny_model: Path) -> None:
    params = SamplingParams(n=3, prompt_logprobs=1)
    assert [each.prompt_logprobs for each in with_samples(params)] == [1, None, None]
    llm = make(tiny_model)
    with pytest.raises(ValueError, match=r"prompt_logprobs must be -1 or in \[0, 20\], got 21"):
        SamplingParams(prompt_logprobs=21)
    (result,) = llm.generate({"prompt_token_ids": PROMPTS[2]}, params, use_tqdm=False)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == 15
    llm.close()


def test_story_scores_as_with_hugging_face(story_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = json.loads((story_model / "expected_greedy.json").read_text())
    stories = [{"prompt_token_ids": (e["prompt_ids"] + e["output_ids"])[:250]} for e in expected]
    model = AutoModelForCausalLM.from_pretrained(story_model, dtype=torch.float32)
    llm = LLM(model=str(story_model), device="cpu", max_num_batched_tokens=100)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for result in llm.generate(stories, params, use_tqdm=False):
        ids = result.prompt_token_ids
        with torch.inference_mode():
            table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        want = table[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()
        assert result.prompt_logprobs is not None
        got = [at[token].logprob for token, at in zip(ids[1:], result.prompt_logprobs[1:], strict=True) if at]
        assert got == pytest.approx(want, abs=1e-3)
        assert sum(got) == pytest.approx(sum(want), abs=1e-2)
    llm.close()
