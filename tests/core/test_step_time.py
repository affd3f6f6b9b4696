"""Estimates of step times."""

from __future__ import annotations

import pytest

from engine.core.engine_request import EngineRequest
from engine.core.fairness.step_time import SHORT_CONTEXT, SHORT_TOKENS, StepTimes
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request


def request(context: int) -> Request:
    made = Request(EngineRequest("a", [1] * (context + 1), SamplingParams()), frozenset(), 0)
    made.num_computed_tokens = context
    return made


SHORT = [request(20)]


def taught(short: float, token: float, *sizes: int) -> StepTimes:
    times = StepTimes()
    for num_tokens in sizes:
        times.record(num_tokens, short + token * num_tokens, SHORT)
    return times


def test_nothing_is_known_before_a_short_step() -> None:
    assert StepTimes().num_tokens(0.032) == 0
    assert taught(0.004, 1e-4, 500, 500).num_tokens(0.032) == 0


def test_the_first_longer_step_shows_the_time_per_token() -> None:
    assert SHORT_TOKENS < taught(0.004, 1e-4, 1, 1, 1).num_tokens(60) < 100


@pytest.mark.parametrize("sizes", [(1, 500, 1, 2, 200), (500, 500, *[2] * 40, *[500] * 40)])
def test_steps_of_the_length_that_was_asked_for(sizes: tuple[int, ...]) -> None:
    num_tokens = taught(0.004, 1e-4, *sizes).num_tokens(0.032)
    assert 0.004 + 1e-4 * num_tokens == pytest.approx(0.032, rel=0.1)


def test_one_step_that_was_held_up_is_forgotten() -> None:
    times = taught(0.004, 1e-4, *[1, 500] * 10)
    times.record(300, 1.0, SHORT)
    times.record(1, 1.0, SHORT)
    for _ in range(60):
        times.record(500, 0.054, SHORT)
        times.record(1, 0.0041, SHORT)
    assert 0.004 + 1e-4 * times.num_tokens(0.032) == pytest.approx(0.032, rel=0.1)


def test_what_long_contexts_take_is_not_taken_for_the_short_steps_time() -> None:
    times = taught(0.004, 1e-4, *[1, 500] * 10)
    for _ in range(100):
        times.record(2, 0.03, [request(SHORT_CONTEXT), *SHORT])
    assert 0.004 + 1e-4 * times.num_tokens(0.032) == pytest.approx(0.032, rel=0.1)


def test_steps_that_cost_nothing_are_not_bounded() -> None:
    assert taught(0.0, 0.0, 1, 500).num_tokens(0.032) == 0
    assert taught(0.004, 0.0, 1, 500).num_tokens(0.032) == 0
    assert taught(1e-9, 100.0, 1, 500).num_tokens(0.032) >= 1
