"""Owners: who is admitted next, who gives way to whom, and that one owner alone is served as if there were none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.micro.fairness import DEVICES, FLOODS, Flood, Simulation
from engine.core.batch import SchedulerOutput, StepResult
from engine.core.engine_request import EngineRequest
from engine.core.request import Request
from engine.core.sampling_params import SamplingParams
from engine.core.scheduler import OTHERS_FRACTION, Scheduler


def make(
    max_num_seqs: int = 8, max_num_batched_tokens: int = 64, num_blocks: int = 1000, caching: bool = True
) -> Scheduler:
    return Scheduler(num_blocks, 4, max_num_seqs, max_num_batched_tokens, 500, caching)


def add(scheduler: Scheduler, ids: Sequence[str], prompt: int = 3, max_tokens: int = 50, priority: int = 0) -> None:
    """The owner of a request is the first letter of its id."""
    for request_id in ids:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        tokens = [int.from_bytes(request_id.encode()) + i for i in range(prompt)]
        engine_request = EngineRequest(request_id, tokens, sampling, priority=priority, owner=request_id[0])
        scheduler.add(Request(engine_request, frozenset(), seed=1))


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.check()
    counts = [int(index not in output.batch.partial) for index in range(len(output.batch))]
    if output:
        scheduler.update(output, StepResult([9] * sum(counts), counts))
    scheduler.check()
    return output


def num_running(scheduler: Scheduler, owner: str) -> int:
    return sum(request.engine_request.owner == owner for request in scheduler.queues.running)


def names(owner: str, count: int) -> list[str]:
    return [f"{owner}{number}" for number in range(count)]


def test_an_owner_that_comes_gets_a_row_at_once() -> None:
    s = make()
    add(s, names("a", 40))
    step(s)
    assert num_running(s, "a") == 8
    add(s, ["b0"])
    output = step(s)
    assert [new.request_id for new in output.new_requests] == ["b0"]
    assert output.removed == ["a7"], "the youngest of the owner that has most"
    assert s.stats().num_preemptions == 1


def test_rows_are_divided_and_nothing_is_preempted_again_and_again() -> None:
    s = make(max_num_seqs=12)
    add(s, names("a", 40), max_tokens=400)
    step(s)
    add(s, names("b", 40), max_tokens=400)
    for _ in range(30):
        step(s)
    assert 4 <= num_running(s, "b") <= 8
    assert s.stats().num_preemptions <= 8


def test_the_only_one_of_an_owner_is_never_preempted_for_another() -> None:
    s = make(max_num_seqs=1)
    add(s, ["a0", "a1"])
    step(s)
    add(s, ["b0"])
    for _ in range(20):
        step(s)
    assert [request.request_id for request in s.queues.running] == ["a0"]


def test_rows_are_not_taken_for_a_lower_priority() -> None:
    s = make()
    add(s, names("a", 8), priority=-1)
    step(s)
    add(s, ["b0"])
    for _ in range(5):
        step(s)
    assert num_running(s, "b") == 0


def test_blocks_are_given_up_too() -> None:
    s = make(num_blocks=100)
    add(s, names("a", 8), prompt=60)
    for _ in range(12):
        step(s)
    assert s.stats().num_running < 8, "the blocks hold no more"
    num_before = num_running(s, "a")
    add(s, ["b0"], prompt=60)
    for _ in range(3):
        step(s)
    assert num_running(s, "b") == 1
    assert num_running(s, "a") < num_before


def test_the_least_served_owner_is_next() -> None:
    """Long prompts count for more than short ones: an owner of short ones has more of them."""
    s = make(max_num_seqs=1, max_num_batched_tokens=500)
    add(s, names("a", 100), prompt=90, max_tokens=1)
    add(s, names("b", 100), prompt=10, max_tokens=1)
    order = [new.request_id[0] for _ in range(40) for new in step(s).new_requests]
    assert 3 <= order.count("a") <= 6
    assert order.count("b") >= 30


def test_an_owner_cannot_save_up_service() -> None:
    s = make(max_num_seqs=1, max_num_batched_tokens=8)
    add(s, ["b0"], max_tokens=1)
    step(s)
    add(s, names("a", 100), max_tokens=1)
    for _ in range(40):
        step(s)
    add(s, names("b", 60), max_tokens=1)
    add(s, ["c"], max_tokens=1)
    order = [new.request_id[0] for _ in range(60) for new in step(s).new_requests]
    assert order[:30].count("a") >= 10, "the others do not wait until it has caught up"


def test_chunks_of_others_are_short_while_a_newcomer_is_served() -> None:
    s = make(max_num_batched_tokens=128)
    add(s, names("a", 20), prompt=400)
    for _ in range(2):
        assert step(s).batch.total_num_tokens == 128
    add(s, ["b0"], prompt=5, max_tokens=8)
    sizes = []
    while s.queues.find("b0") is not None:
        output = step(s)
        assert "b0" in output.batch.request_ids, "it is in every step"
        sizes.append(output.batch.total_num_tokens)
    assert len(sizes) == 8
    assert max(sizes) <= 5 + max(128 // OTHERS_FRACTION, 5)
    assert step(s).batch.total_num_tokens == 128


def test_a_newcomer_is_favoured_for_a_while_only() -> None:
    s = make(max_num_batched_tokens=128)
    add(s, names("a", 20), prompt=400)
    step(s)
    add(s, ["b0"], prompt=5, max_tokens=200)
    sizes = [step(s).batch.total_num_tokens for _ in range(100)]
    assert sizes[0] < 20
    assert sizes[-1] == 128
    assert s.queues.has_favoured is False


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.name)
def test_a_flood_hardly_slows_another_owner_and_costs_little(flood: Flood) -> None:
    device = DEVICES[0]
    alone = Simulation(device, None, fair=True, seconds=12).run()
    fair, fcfs = (Simulation(device, flood, fair=each, seconds=12).run() for each in (True, False))
    assert fair.p95 < 4 * alone.p95
    assert fcfs.p95 > 50 * alone.p95
    assert fair.num_tokens > 0.95 * fcfs.num_tokens
