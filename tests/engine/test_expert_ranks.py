"""Experts divided among processes, over gloo. By itself: a process holds one group of ranks at a time."""

from pathlib import Path

import pytest

from tests.engine.test_ranks import KINDS, PROMPTS, start


@pytest.mark.usefixtures("forked")
def test_two_ranks_divide_the_experts(tiny_experts: Path) -> None:
    one, two = start(tiny_experts, 1), start(tiny_experts, 2)
    for kind in ("greedy", "samples", "a grammar"):
        expected, got = (llm.generate(PROMPTS, KINDS[kind], use_tqdm=False) for llm in (one, two))
        for mine, theirs in zip(got, expected, strict=True):
            assert [output.token_ids for output in mine.outputs] == [output.token_ids for output in theirs.outputs]
    one.close()
    two.close()
