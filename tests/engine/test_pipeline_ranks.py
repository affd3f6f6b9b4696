"""Stages of several ranks each, over gloo. By itself: a process holds one group of ranks at a time."""

from pathlib import Path

import pytest

from tests.engine.test_pipeline import same
from tests.engine.test_ranks import KINDS, PROMPTS, start


@pytest.mark.usefixtures("forked")
def test_two_stages_of_two_ranks(demo_model: Path) -> None:
    one, four = start(demo_model, 1), start(demo_model, 2, pipeline_parallel_size=2)
    try:
        for kind in ("greedy", "a grammar"):
            same(one, four, PROMPTS, KINDS[kind])
        assert four._engine.runner.device_name.startswith("4 x CPU")
    finally:
        one.close()
        four.close()


@pytest.mark.slow
def test_four_stages(demo_model: Path) -> None:
    one, four = start(demo_model, 1), start(demo_model, 1, pipeline_parallel_size=4)
    try:
        for params in KINDS.values():
            same(one, four, PROMPTS, params)
    finally:
        one.close()
        four.close()
