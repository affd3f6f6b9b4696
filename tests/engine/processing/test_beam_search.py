"""Beam search: vLLM's scores by their definition, and Hugging Face's beams."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, BeamSearchParams, SamplingParams
from engine.processing.beam_search import BeamSearch
from tests.support.beams import Model, by_definition, chance, top_logprobs

PROMPTS = [[(7 * i + k * k) % 250 for k in range(n)] for i, n in enumerate((5, 16, 33))]


def searched(model: Model, prompt: list[int], params: BeamSearchParams) -> tuple[list[tuple[list[int], float]], int]:
    """The answers with their log-probabilities, and how many tokens were asked for."""
    search, num_asked = BeamSearch(len(prompt), params, {0}), 0
    while not search.is_over:
        num_asked += len(search.beams)
        found = [model(prompt + beam.token_ids) for beam in search.beams]
        search.advance([top_logprobs(each, 2 * params.beam_width) for each in found])
    return [(beam.token_ids, beam.cumulative_logprob) for beam in search.best()], num_asked


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_scores_are_those_of_the_definition(length_penalty: float, ignore_eos: bool) -> None:
    num_asked, num_most = 0, 0
    for seed, width in itertools.product(range(8), (1, 2, 5)):
        params = BeamSearchParams(beam_width=width, max_tokens=9, length_penalty=length_penalty, ignore_eos=ignore_eos)
        model, prompt = chance(seed, 6), [5] * (1 + seed)
        found, asked = searched(model, prompt, params)
        assert found == by_definition(model, prompt, params, 0)
        num_asked, num_most = num_asked + asked, num_most + 9 * width
    if not ignore_eos and length_penalty <= 0:
        assert num_asked < 0.8 * num_most, "it goes on after nothing better can come"


def test_a_wide_search_finds_the_most_likely_of_all() -> None:
    params = BeamSearchParams(beam_width=10, max_tokens=3, length_penalty=0)
    for seed in range(20):
        model = chance(seed, 3)
        answers = [list(each) for n in (1, 2, 3) for each in itertools.product(range(3), repeat=n)]
        whole = [each for each in answers if 0 not in each[:-1] and (len(each) == 3 or each[-1] == 0)]

        def total(answer: list[int], model: Model = model) -> float:
            return sum(model([1, *answer[:i]])[token] for i, token in enumerate(answer))

        found, _ = searched(model, [1], params)
        assert found[0][0] == max(whole, key=total)
        assert found[0][1] == pytest.approx(total(found[0][0]))


@pytest.mark.parametrize(
    ("name", "value"),
    [("beam_width", 0), ("beam_width", 11), ("max_tokens", 0), ("temperature", 0.5), ("length_penalty", math.nan)],
)
def test_what_is_out_of_range(name: str, value: float) -> None:
    fields: dict[str, Any] = {"beam_width": 2, "max_tokens": 4, name: value}
    with pytest.raises(ValueError, match=f"{name} must be"):
        BeamSearchParams(**fields)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(model=str(tiny_model), device="cpu", dtype="float32", num_gpu_blocks_override=256, block_size=16)
    yield llm
    llm.close()


def theirs(
    folder: Path, prompt: list[int], width: int, max_tokens: int, **options: Any
) -> list[tuple[list[int], float]]:
    """Hugging Face's beams, each with its log-probability: without a length penalty scores are the same."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    more = {"num_return_sequences": width, "do_sample": False, "length_penalty": 0.0, "early_stopping": "never"}
    given = torch.tensor([prompt])
    found = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        num_beams=width,
        max_new_tokens=max_tokens,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        temperature=None,
        top_k=None,
        top_p=None,
        **more,
        **options,
    )
    tokens = [sequence[len(prompt) :].tolist() for sequence in found.sequences]
    return list(zip(tokens, found.sequences_scores.tolist(), strict=True))


@pytest.mark.heavy
def test_hugging_face_finds_the_same(llm: LLM, tiny_model: Path) -> None:
    width = 4
    params = BeamSearchParams(beam_width=width, max_tokens=12, ignore_eos=True, length_penalty=0)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = theirs(tiny_model, prompt, width, 12, eos_token_id=None)
        found = [(each.tokens[len(prompt) :], each.cum_logprob) for each in output.sequences]
        for (own, logprob), (other, score) in zip(found, expected, strict=True):
            assert own == other
            assert logprob == pytest.approx(score, abs=1e-3)
        for each in output.sequences:
            assert each.tokens[: len(prompt)] == prompt
            chosen = zip(each.logprobs, each.tokens[len(prompt) :], strict=True)
            assert each.cum_logprob == pytest.approx(sum(at[token_id].logprob for at, token_id in chosen))
            assert (each.finish_reason, each.stop_reason) == ("length", None)


def test_one_beam_is_greedy(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    greedy = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    (output,) = llm.beam_search(PROMPTS[0], params)
    assert [each.tokens for each in output.sequences] == [PROMPTS[0] + greedy[0].outputs[0].token_ids]


def test_answers_end_where_the_context_does(llm: LLM) -> None:
    prompt = [1] * 4090
    (output,) = llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=100, ignore_eos=True))
    assert [len(each.tokens) for each in output.sequences] == [4096, 4096]


@pytest.mark.heavy
def test_a_model_that_ends_its_answers(story_model: Path) -> None:
    llm = LLM(model=str(story_model), device="cpu", dtype="float32", num_gpu_blocks_override=256)
    try:
        (output,) = llm.beam_search("Once upon a time", BeamSearchParams(beam_width=3, max_tokens=20, length_penalty=0))
        prompt = llm.get_tokenizer().encode("Once upon a time")
        (best, score), *_ = theirs(story_model, prompt, 3, 20)
        assert output.sequences[0].tokens == prompt + best
        assert output.sequences[0].cum_logprob == pytest.approx(score, abs=1e-3)
        assert (output.sequences[0].text or "").startswith("Once upon a time")
    finally:
        llm.close()
