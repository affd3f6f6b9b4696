"""Pipeline parallelism with real processes, over gloo: stages answer as one process does, and work at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine import LLM, SamplingParams
from engine.core.batch import ScheduledBatch, SchedulerOutput, StepResult
from engine.worker.parallel.ranks import PipelinedStep, RankedRunner
from engine.worker.step_handle import StepHandle
from tests.engine.test_ranks import KINDS, PROMPTS, start


@pytest.fixture(scope="module")
def stages(demo_model: Path) -> Iterator[tuple[LLM, LLM]]:
    """The same model in one process and in two stages, short of blocks as in `start`."""
    one, two = start(demo_model, 1), start(demo_model, 1, pipeline_parallel_size=2)
    yield one, two
    one.close()
    two.close()


def same(one: LLM, other: LLM, prompts: list[str], params: SamplingParams) -> None:
    pairs = zip(*(llm.generate(prompts, params, use_tqdm=False) for llm in (one, other)), strict=True)
    for expected, got in pairs:
        assert [output.token_ids for output in got.outputs] == [output.token_ids for output in expected.outputs]
        for mine, theirs in zip(got.outputs, expected.outputs, strict=True):
            for a, b in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
                assert {i: each.logprob for i, each in a.items()} == pytest.approx(
                    {i: each.logprob for i, each in b.items()}, abs=1e-4
                )


@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_answer_as_one_process(stages: tuple[LLM, LLM], kind: str) -> None:
    same(*stages, PROMPTS, KINDS[kind])


def test_what_a_prefix_shares_is_found_in_every_stage(stages: tuple[LLM, LLM]) -> None:
    prompt = "Once upon a time there was a small cat who lived in a house by the sea"
    short = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for _ in range(2):
        same(*stages, [prompt], short)
    hits = [llm._engine.stats().prefix_hits for llm in stages]
    assert hits[0] == hits[1] > 0


def test_embeddings_of_two_stages(stages: tuple[LLM, LLM]) -> None:
    one, two = (llm.embed(PROMPTS, use_tqdm=False) for llm in stages)
    for expected, got in zip(one, two, strict=True):
        assert got.outputs.embedding == pytest.approx(expected.outputs.embedding, abs=1e-5)


def test_a_step_is_launched_while_the_last_stage_works_on_another(
    stages: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage has been told of the next step when the last one begins with a step."""
    _, two = stages
    told: list[int] = []
    ran: list[int] = []
    launch, run = RankedRunner.launch, PipelinedStep.run

    def launching(self: RankedRunner, output: Any) -> Any:
        told.append(output.step)
        return launch(self, output)

    def running(self: PipelinedStep) -> Any:
        if self._handle is None:
            ran.append(len(told) - len(ran))
        return run(self)

    monkeypatch.setattr(RankedRunner, "launch", launching)
    monkeypatch.setattr(PipelinedStep, "run", running)
    two.generate(PROMPTS[:2], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), use_tqdm=False)
    assert len(ran) == len(told)
    assert sum(number == 2 for number in ran) > len(ran) / 2, "two steps, of which the other stage has one"


def test_the_first_stage_gets_runs_of_tokens() -> None:
    """All tokens since it was told last, in order: of two steps that are read between two launches, too."""
    sampled: dict[str, list[int]] = {}
    for ids, counts, token_ids in ((["a", "b", "c"], [1, 3, 0], [4, 5, 6, 7]), (["b", "a"], [1, 2], [8, 9, 10])):
        output = SchedulerOutput(1, [], ScheduledBatch(ids, [1] * len(ids), len(ids), len(ids), []), {}, [])
        handle = SimpleNamespace(read=partial(tuple, (output, StepResult(token_ids, counts))))
        PipelinedStep(partial(cast, StepHandle, handle), sampled).read()
    assert sampled == {"a": [4, 9, 10], "b": [5, 6, 7, 8]}
