"""Tenants: who is admitted next, who gives way to whom, and that one tenant alone is served as if there were none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.batch import SchedulerOutput, StepResult
from engine.core.engine_request import EngineRequest
from engine.core.fairness.arrivals import AWAY_SECONDS
from engine.core.fairness.request_queues import FAVOURED_REQUESTS, FAVOURED_STEPS
from engine.core.fairness.step_budget import EXPECTED_STEPS, SHARED_STEPS
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.step_planner import PAUSED_STEPS
from tests.support.flood import CPU, FLOODS, Flood, Simulation


def make(
    max_num_seqs: int = 8, max_num_batched_tokens: int = 64, num_blocks: int = 1000, caching: bool = True
) -> Scheduler:
    """Steps take no time, so none is bounded by it."""
    return Scheduler(num_blocks, 4, max_num_seqs, max_num_batched_tokens, 500, caching, clock=lambda: 0.0)


def add(scheduler: Scheduler, ids: Sequence[str], prompt: int = 3, max_tokens: int = 50, priority: int = 0) -> None:
    """The tenant of a request is the first letter of its id; if it has a slash, that before the dot."""
    for request_id in ids:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        tenant = request_id.partition(".")[0] if "/" in request_id else request_id[0]
        tokens = [int.from_bytes(request_id.encode()) + i for i in range(prompt)]
        engine_request = EngineRequest(request_id, tokens, sampling, priority=priority, tenant=tenant)
        scheduler.add(Request(engine_request, frozenset(), seed=1))


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.check()
    counts = [int(index not in output.batch.partial) for index in range(len(output.batch))]
    if output:
        scheduler.update(output, StepResult([9] * sum(counts), counts))
    scheduler.check()
    return output


def num_running(scheduler: Scheduler, tenant: str) -> int:
    return sum(request.engine_request.tenant == tenant for request in scheduler.queues.running)


def names(tenant: str, count: int) -> list[str]:
    return [f"{tenant}{number}" for number in range(count)]


def test_a_tenant_that_comes_gets_a_row_at_once() -> None:
    s = make()
    add(s, names("a", 40))
    step(s)
    assert num_running(s, "a") == 8
    add(s, ["b0"])
    output = step(s)
    assert [new.request_id for new in output.new_requests] == ["b0"]
    assert output.removed == ["a7"], "the youngest of the tenant that has most"
    assert s.stats().num_preemptions == 1


def test_a_tenant_that_comes_gets_blocks_at_once() -> None:
    """Not when there is one left for each request of the other tenant: those run after it, and it is preempted for
    none.
    """
    s = make(max_num_seqs=64, num_blocks=100, caching=False)
    add(s, names("a", 60), max_tokens=300)
    while s.blocks.num_free_blocks > 10:
        step(s)
    add(s, ["b0"], max_tokens=8)
    before = s.stats().num_preemptions
    output = step(s)
    assert [new.request_id for new in output.new_requests] == ["b0"]
    assert s.stats().num_preemptions == before, "there are free blocks"
    while num_running(s, "b"):
        step(s)
    add(s, ["b1"], prompt=40, max_tokens=8)
    output = step(s)
    assert [new.request_id for new in output.new_requests] == ["b1"], "several give way to it in one step"
    assert s.stats().num_preemptions > before + 1


def test_rows_are_divided_and_nothing_is_preempted_again_and_again() -> None:
    s = make(max_num_seqs=12)
    add(s, names("a", 40), max_tokens=400)
    step(s)
    add(s, names("b", 40), max_tokens=400)
    for _ in range(30):
        step(s)
    assert 4 <= num_running(s, "b") <= 8
    assert s.stats().num_preemptions <= 8


def test_the_only_one_of_a_tenant_is_never_preempted_for_another() -> None:
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


def test_the_least_served_tenant_is_next() -> None:
    """Long prompts count for more than short ones: a tenant of short ones has more of them."""
    s = make(max_num_seqs=1, max_num_batched_tokens=500)
    add(s, names("a", 100), prompt=90, max_tokens=1)
    add(s, names("b", 100), prompt=10, max_tokens=1)
    order = [new.request_id[0] for _ in range(40) for new in step(s).new_requests]
    assert 3 <= order.count("a") <= 6
    assert order.count("b") >= 30


def test_a_tenant_cannot_save_up_service() -> None:
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


def test_others_pause_while_a_newcomer_is_served() -> None:
    s = make(max_num_batched_tokens=128)
    add(s, names("a", 20), prompt=400)
    for _ in range(2):
        assert step(s).batch.total_num_tokens == 128
    add(s, ["b0"], prompt=5, max_tokens=8)
    sizes = []
    while s.queues.find("b0") is not None:
        output = step(s)
        assert output.batch.request_ids == ["b0"]
        sizes.append(output.batch.total_num_tokens)
    assert sizes == [5, *[1] * 7]
    assert step(s).batch.total_num_tokens == 128


def test_who_comes_does_not_hold_up_one_that_is_there_with_less_to_do() -> None:
    s = make(max_num_batched_tokens=128)
    add(s, ["b0"], prompt=5, max_tokens=8)
    for _ in range(3):
        step(s)
    add(s, ["a0"], prompt=400)
    for _ in range(5):
        assert "b0" in step(s).batch.request_ids
    assert s.queues.find("b0") is None


def test_others_pause_where_none_of_them_runs_yet() -> None:
    s = make(max_num_batched_tokens=128)
    add(s, names("a", 20))
    add(s, ["b0"])
    assert [step(s).batch.request_ids for _ in range(3)] == [["b0"]] * 3


def test_a_crowd_is_not_favoured() -> None:
    s = make(max_num_batched_tokens=128, max_num_seqs=64)
    add(s, ["b0"], prompt=5, max_tokens=8)
    step(s)
    add(s, names("a", FAVOURED_REQUESTS), prompt=3, max_tokens=4)
    assert len(step(s).batch) == FAVOURED_REQUESTS + 1
    add(s, ["a99"], prompt=3, max_tokens=4)
    assert step(s).batch.request_ids == ["b0"]


def test_others_go_on_while_the_last_token_is_in_flight() -> None:
    s = make(max_num_batched_tokens=128)
    add(s, names("a", 20), prompt=400)
    step(s)
    add(s, ["b0"], prompt=5, max_tokens=1)
    first, second = s.schedule(), s.schedule()
    assert first.batch.request_ids == ["b0"]
    assert second.batch.total_num_tokens == 128


def test_a_newcomer_is_favoured_for_a_while_only() -> None:
    s = make(max_num_batched_tokens=256)
    add(s, names("a", 20), prompt=400)
    step(s)
    add(s, ["b0"], prompt=5, max_tokens=200)
    sizes = [step(s).batch.total_num_tokens for _ in range(FAVOURED_STEPS + 10)]
    assert sizes[:3] == [5, 1, 1]
    assert sum(size < 256 for size in sizes) == FAVOURED_STEPS
    assert s.queues.has_favoured is False


def test_others_are_not_stopped_by_newcomers_without_end() -> None:
    s = make(max_num_batched_tokens=128)
    add(s, names("a", 20), prompt=400)
    step(s)
    sizes = []
    for number in range(6 * PAUSED_STEPS):
        add(s, [f"{chr(ord('b') + number % 20)}{number}"], prompt=5, max_tokens=3)
        sizes.append(step(s).batch.total_num_tokens)
    assert sizes.count(128) >= 5


def test_a_newcomer_that_finds_no_blocks_stops_no_other() -> None:
    s = make(num_blocks=30, max_num_seqs=2)
    add(s, ["a0"], prompt=100, max_tokens=15)
    step(s)
    add(s, ["b0"], prompt=100, max_tokens=15)
    assert [step(s).batch.request_ids for _ in range(10)] == [["a0"]] * 10


def test_invented_users_get_no_more_than_their_address() -> None:
    s = make()
    add(s, [f"a/{number}.0" for number in range(40)])
    step(s)
    assert not s.queues.has_favoured, "a crowd"
    add(s, names("b", 4), max_tokens=400)
    for _ in range(12):
        step(s)
    assert num_running(s, "b") == 3
    for number in range(40, 80):  # names that are new each time
        add(s, [f"a/{number}.0"])
        step(s)
        assert num_running(s, "b") == 3


def test_users_of_one_address_share_what_it_gets() -> None:
    s = make()
    add(s, [f"a/1.{number}" for number in range(40)])
    step(s)
    add(s, [f"a/2.{number}" for number in range(4)])
    for _ in range(4):
        step(s)
    assert (num_running(s, "a/1"), num_running(s, "a/2")) == (5, 3)


def test_the_least_served_user_of_an_address_is_next() -> None:
    s = make(max_num_seqs=1)
    add(s, ["a/1.0", "a/1.1", "a/2.0"], max_tokens=3)
    started = [new.request_id for _ in range(12) for new in step(s).new_requests]
    assert started == ["a/1.0", "a/2.0", "a/1.1"]


class Clock:
    """The time; a step of the scheduler `s` takes 4 ms, and 1 ms for each of its tokens."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def step(self, s: Scheduler) -> int:
        """Runs one; returns the number of its tokens."""
        output = s.schedule()
        s.check()
        self.now += 4e-3 + 1e-3 * output.batch.total_num_tokens
        counts = [int(index not in output.batch.partial) for index in range(len(output.batch))]
        s.update(output, StepResult([9] * sum(counts), counts))
        return output.batch.total_num_tokens


def flooded() -> tuple[Scheduler, Clock]:
    """A tenant floods, after the scheduler has learnt how long steps take; no other was ever there."""
    clock = Clock()
    s = Scheduler(10_000, 4, 64, 1024, 500, clock=clock)
    add(s, ["a0"], prompt=100, max_tokens=20)
    while s.has_work():
        clock.step(s)
    add(s, names("a", 60), prompt=400)
    return s, clock


def test_steps_are_not_bounded_for_one_tenant() -> None:
    s, clock = flooded()
    assert [clock.step(s) for _ in range(10)] == [1024] * 10


def test_steps_are_short_while_there_are_two() -> None:
    s, clock = flooded()
    add(s, ["b0"], prompt=20, max_tokens=400)
    sizes = [clock.step(s) for _ in range(4 * FAVOURED_STEPS)]
    for size in sizes[2 * FAVOURED_STEPS :]:
        assert SHARED_STEPS / 2 < (4e-3 + 1e-3 * size) / 4e-3 < SHARED_STEPS * 1.5


def test_steps_are_shorter_while_one_that_has_left_may_come() -> None:
    s, clock = flooded()
    add(s, ["b0"], prompt=20, max_tokens=8)
    while s.queues.find("b0"):
        clock.step(s)
    alone_since = clock.now
    while clock.now < alone_since + AWAY_SECONDS - 1:
        seconds = 4e-3 + 1e-3 * clock.step(s)
        assert EXPECTED_STEPS / 2 < seconds / 4e-3 < EXPECTED_STEPS * 1.5
    while clock.now < alone_since + AWAY_SECONDS + 1:
        num_tokens = clock.step(s)
    assert num_tokens == 1024


def test_steps_are_long_while_a_regular_visitor_is_not_expected() -> None:
    """It asks three seconds after each of its answers; the longest step takes one."""
    s, clock = flooded()
    for number in range(3):
        add(s, [f"b{number}"], prompt=20, max_tokens=8)
        while s.queues.find(f"b{number}"):
            clock.step(s)
        add(s, [f"a{number}-{i}" for i in range(60)], prompt=400)
        left = clock.now
        while clock.now < left + 3:
            num_tokens = clock.step(s)
            if number and clock.now < left + 1:
                assert num_tokens == 1024
        assert num_tokens < 100


def test_no_step_is_longer_than_until_a_regular_visitor_comes() -> None:
    """It asks a tenth of a second after each answer; without it a step takes a second."""
    s, clock = flooded()
    for number in range(3):
        add(s, [f"b{number}"], prompt=20, max_tokens=8)
        while s.queues.find(f"b{number}"):
            clock.step(s)
        left = clock.now
        clock.step(s)
        assert number == 0 or 0.05 < clock.now - left < 0.13
        clock.now = max(clock.now, left + 0.1)


def test_a_step_has_the_same_time_where_one_is_always_in_flight() -> None:
    """A request then waits for two steps, which are half as long."""
    s, clock = flooded()
    add(s, ["b0"], prompt=20, max_tokens=400)
    before, sizes = s.schedule(), []
    for _ in range(4 * FAVOURED_STEPS):
        output = s.schedule()
        clock.now += 4e-3 + 1e-3 * before.batch.total_num_tokens
        counts = [int(index not in before.batch.partial) for index in range(len(before.batch))]
        s.update(before, StepResult([9] * sum(counts), counts))
        s.check()
        before = output
        sizes.append(output.batch.total_num_tokens)
    assert SHARED_STEPS / 4 < (4e-3 + 1e-3 * sizes[-1]) / 4e-3 < SHARED_STEPS * 0.75


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.name)
def test_a_flood_hardly_slows_another_tenant_and_costs_little(flood: Flood) -> None:
    alone = Simulation(CPU, None, fair=True, seconds=12).run()
    fair, fcfs = (Simulation(CPU, flood, fair=each, seconds=12).run() for each in (True, False))
    assert max(fair.latencies[2:]) < 2.2 * alone.p95, "the first ones met steps that were not bounded"
    assert fcfs.p95 > 50 * alone.p95
    assert fair.num_tokens > 0.95 * fcfs.num_tokens
