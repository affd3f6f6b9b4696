"""Rows of logits that are not finite: their requests end with an error, and all others get what they get without
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from engine import LLM, BeamSearchParams
from engine.core.batch import FAULTS, NOT_FINITE, NOTHING_ALLOWED
from engine.core.engine_request import EngineRequest
from engine.core.params.pooling import UNSAMPLED, PoolingParams
from engine.core.params.sampling import SamplingParams
from engine.errors import EngineError
from engine.models.decoder import Decoder
from engine.worker.forward_pass import ForwardPass
from tests.engine.test_special_sampling import SPECIAL
from tests.engine.test_structured_outputs import ASKED, Loop, params

POISON = 5  # the model computes NaN after this token
KINDS = [
    *({"max_tokens": 20, **fields} for fields in SPECIAL),
    {"max_tokens": 20, "top_k": 5, "seed": 1},
    {"max_tokens": 20, "logprobs": 3, "top_p": 0.9, "seed": 2},
    {"max_tokens": 20, "prompt_logprobs": 1, "ignore_eos": True, "seed": 3},
]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ForwardPass._layers

    def with_nan(
        self: ForwardPass, num_tokens: int, groups: Any, indices: torch.Tensor | None, *more: Any
    ) -> torch.Tensor:
        hidden, ids = forward(self, num_tokens, groups, indices, *more), self.step.input_ids[:num_tokens]
        return hidden.masked_fill(((ids if indices is None else ids[indices]) == POISON).unsqueeze(1), float("nan"))

    monkeypatch.setattr(ForwardPass, "_layers", with_nan)


def run(model: Path, with_bad: bool) -> tuple[dict[str, list[int]], Loop]:
    loop = Loop(model, max_num_seqs=8, debug_checks=True)
    kinds = [SamplingParams(**fields) for fields in KINDS] + [params(seed=i, **each) for i, each in enumerate(ASKED)]
    for i, sampling in enumerate(kinds):
        sampling = sampling.clone(bad_words=[*(sampling.bad_words or []), [POISON]])
        loop.add(f"good-{i}", sampling, [10 + i] * 20)
        if with_bad:
            loop.add(f"bad-{i}", sampling, [10 + i] * 40 + [POISON])
    return loop.run(), loop


def test_each_kind_of_request(tiny_model: Path, poisoned: None, caplog: pytest.LogCaptureFixture) -> None:
    alone, _ = run(tiny_model, with_bad=False)
    caplog.clear()
    tokens, loop = run(tiny_model, with_bad=True)
    assert {name: found for name, found in tokens.items() if name.startswith("good")} == alone
    bad = [name for name in tokens if name.startswith("bad")]
    for name in bad:
        (output,) = loop.outputs[name]
        assert (output.finish_reason, output.error, output.new_token_ids) == ("error", FAULTS[NOT_FINITE], []), name
        assert f"request {name}: the logits are not finite" in caplog.text
    stats = loop.engine.stats()
    assert stats.num_corrupted == len(bad)
    loop.engine.close()


def test_kv_that_may_be_nan_is_not_found_again(tiny_model: Path, poisoned: None) -> None:
    loop = Loop(tiny_model)
    for name in ("first", "second"):
        loop.add(name, SamplingParams(temperature=0), [1] * 60 + [POISON])
        loop.run()
        assert loop.outputs[name][-1].num_cached_tokens == 0
    pool = loop.engine.scheduler.blocks.pools.pools[0]
    assert len(pool.free_and_empty()) == pool.num_blocks


def test_nan_in_the_middle_of_an_answer(tiny_model: Path, poisoned: None) -> None:
    loop = Loop(tiny_model)
    loop.add("a", SamplingParams(temperature=0, max_tokens=30, min_tokens=20, logit_bias={POISON: 100.0, 7: 99.0}))
    assert loop.run()["a"] == [POISON], "what had come is kept"
    assert loop.ended("a") == "error"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("num_top", [0, 2])
def test_prompt_logprobs(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, value: float, num_top: int) -> None:
    """The logits that answers are sampled from are finite; only a token within the prompt has others."""
    logits = Decoder.logits

    def corrupt(self: Decoder, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        found = logits(self, hidden, *args)
        if len(found) == 6:  # positions that are scored at a time
            found[3, 7] = value
        return found

    monkeypatch.setattr(Decoder, "logits", corrupt)
    monkeypatch.setattr("engine.worker.sampling.logprobs.MAX_ELEMENTS", 300 * 6)
    loop = Loop(tiny_model, max_num_batched_tokens=16, debug_checks=True)
    scored = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=num_top, ignore_eos=True)
    loop.add("good", scored, [8] * 4)
    loop.add("bad", scored, [9] * 40)
    tokens = loop.run()
    assert len(tokens["good"]) == 4
    (output,) = loop.outputs["bad"]
    assert (output.finish_reason, output.error, output.new_token_ids) == ("error", FAULTS[NOT_FINITE], [])
    assert loop.engine.stats().num_corrupted == 1
    pool = loop.engine.scheduler.blocks.pools.pools[0]
    assert len(pool.free_and_empty()) == pool.num_blocks, "no request finds its KV"
    loop.engine.close()


def test_embeddings(tiny_model: Path, poisoned: None) -> None:
    loop = Loop(tiny_model)
    for name, prompt in (("good", [1, 2, 3]), ("last", [1, 2, POISON]), ("mean", [POISON, 1, 2])):
        loop.outputs[name] = []
        pooling = PoolingParams(pooling="mean" if name == "mean" else "last")
        loop.engine.add_request(EngineRequest(name, prompt, UNSAMPLED, pooling))
    loop.run()
    assert loop.ended("good") == "stop"
    assert loop.outputs["good"][-1].embedding
    for name in ("last", "mean"):
        assert loop.outputs[name][-1].error == FAULTS[NOT_FINITE]
        assert loop.outputs[name][-1].embedding is None
    assert loop.engine.stats().num_corrupted == 2


def test_an_embedding_that_failed_is_not_taken_for_an_empty_one(tiny_model: Path, poisoned: None) -> None:
    llm = LLM(str(tiny_model), device="cpu", num_gpu_blocks_override=64)
    with pytest.raises(EngineError, match="not finite"):
        llm.embed([[1, 2], [1, POISON]], use_tqdm=False)
    with pytest.raises(EngineError, match="not finite"):
        llm.beam_search([[1, POISON]], BeamSearchParams(beam_width=2, max_tokens=2))
    llm.close()


def test_a_corrupted_prompt_does_not_lose_the_other_answers(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    llm = LLM(str(tiny_model), device="cpu", num_gpu_blocks_override=64, max_num_batched_tokens=16)
    scored = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True, bad_words=[[POISON]])
    good = [[8] * 20, [9] * 20]
    alone = [result.outputs[0] for result in llm.generate(good, scored, use_tqdm=False)]
    first, failed, last = llm.generate([good[0], [7] * 30 + [POISON, 7, 7], good[1]], scored, use_tqdm=False)
    assert [first.outputs[0], last.outputs[0]] == alone
    assert all(len(each.prompt_logprobs or ()) == 20 for each in (first, last))
    assert failed.prompt_logprobs is None, "some of them are known"
    (completion,) = failed.outputs
    assert (completion.finish_reason, completion.error, completion.text) == ("error", FAULTS[NOT_FINITE], "")
    llm.close()


def test_a_request_that_excludes_all_tokens_says_so(tiny_model: Path) -> None:
    loop = Loop(tiny_model)
    loop.add("a", SamplingParams(bad_words=[[i] for i in range(300)]))
    loop.add("b", SamplingParams(allowed_token_ids=[7], max_tokens=3))
    assert loop.run() == {"a": [], "b": [7, 7, 7]}
    assert loop.outputs["a"][-1].error == FAULTS[NOTHING_ALLOWED]
    assert loop.engine.stats().num_corrupted == 0, "nothing is wrong with the model"


def test_both_sides_mean_the_same() -> None:
    assert (NOT_FINITE, NOTHING_ALLOWED) == (kernels.NOT_FINITE, kernels.NOTHING_ALLOWED)
