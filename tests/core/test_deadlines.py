"""Deadlines in the scheduler: requests are not begun when they would miss them."""

from __future__ import annotations

import pytest

from engine.core.batch import EngineOutput, SchedulerOutput, StepResult
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler


@pytest.fixture
def clock() -> list[float]:
    """The time, to be set."""
    return [1000.0]


def add(s: Scheduler, request_id: str, prompt: int = 5, deadline: float = 0.0) -> Request:
    engine_request = EngineRequest(
        request_id, [*range(prompt)], SamplingParams(max_tokens=50), deadline=deadline, cache_salt=request_id
    )
    request = Request(engine_request, frozenset(), 0)
    s.add(request)
    return request


def step(s: Scheduler) -> tuple[SchedulerOutput, list[EngineOutput]]:
    output = s.schedule()
    late = s.take_late()
    s.check()
    counts = [int(index not in output.batch.partial) for index in range(len(output.batch))]
    if output:
        s.update(output, StepResult([9] * sum(counts), counts))
    s.check()
    return output, late


def test_a_prompt_that_cannot_be_computed_in_time_is_not_begun(clock: list[float]) -> None:
    s = Scheduler(1000, 4, 8, 1000, 2000, clock=lambda: clock[0])
    add(s, "pace", 100)
    output = s.schedule()
    clock[0] += 1  # 10 ms for each token
    s.update(output, StepResult([9], [1]))
    add(s, "late", 500, deadline=clock[0] + 4)
    add(s, "fine", 500, deadline=clock[0] + 6)
    output, late = step(s)
    assert [each.request_id for each in late] == ["late"]
    assert [new.request_id for new in output.new_requests] == ["fine"]


def test_the_prefix_is_looked_up_once_for_all_questions_on_an_admission(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = Scheduler(1000, 4, 8, 1000, 2000, clock=lambda: clock[0])
    lookups: list[Request] = []
    match_prefix = s.blocks.match_prefix

    def counted(request: Request) -> list[list[int]]:
        lookups.append(request)
        return match_prefix(request)

    monkeypatch.setattr(s.blocks, "match_prefix", counted)
    for number in range(2):  # in time only because the prefix is cached
        engine_request = EngineRequest(
            str(number), [*range(500)], SamplingParams(max_tokens=1), deadline=number and clock[0] + 2
        )
        s.add(Request(engine_request, frozenset(), 0))
        lookups.clear()
        output = s.schedule()
        assert len(lookups) == 1
        clock[0] += 5
        s.update(output, StepResult([9], [1]))
    assert output.new_requests[0].num_computed_tokens == 496


def test_a_wrong_guess_does_not_last(clock: list[float]) -> None:
    s = Scheduler(1000, 4, 8, 1000, 2000, clock=lambda: clock[0])
    add(s, "slow", 100)
    output = s.schedule()
    clock[0] += 1000  # something else took so long
    s.update(output, StepResult([9], [1]))
    num_refused = 0
    for number in range(30):
        add(s, str(number), 100, deadline=clock[0] + 5)
        num_refused += len(step(s)[1])
    assert 1 <= num_refused <= 10
