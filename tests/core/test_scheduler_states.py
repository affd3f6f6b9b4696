"""Scheduler: how many requests of a model with states run at once, and what happens when states are short."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest

from engine.core.batch import SchedulerOutput, StepResult
from engine.core.engine_request import EngineRequest
from engine.core.kv.block_pools import UNHELD
from engine.core.kv.cache_groups import FULL, CacheGroup
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler

SIZE = 16
STATES = (FULL, CacheGroup(pool=1, is_state=True))


def make(num_states: int, num_blocks: int = 10_000, enable_prefix_caching: bool = True) -> Scheduler:
    return Scheduler([num_blocks, num_states], SIZE, 64, 4096, 4096, enable_prefix_caching, STATES)


def request(name: str, prompt: list[int], num_output: int) -> Request:
    sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
    return Request(EngineRequest(name, prompt, sampling), frozenset(), seed=1)


def prompt_of(length: int, seed: int) -> list[int]:
    return Random(seed).choices(range(1000), k=length)


@dataclass
class Run:
    """Observations of requests that ran to their ends, one step ahead."""

    batches: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # states of each running request after each step
    waited: int = 0  # steps without one of the running requests


def run(scheduler: Scheduler) -> Run:
    seen, in_flight = Run(), deque[SchedulerOutput]()
    while scheduler.has_work():
        if output := scheduler.schedule():
            in_flight.append(output)
            may_run = [r for r in scheduler.queues.running if r.num_computed_tokens + 1 < r.max_num_tokens]
            seen.waited += any(r.request_id not in output.batch.request_ids for r in may_run)
            seen.batches.append(len(output.batch))
        if len(in_flight) == 2 or not output:
            batch = in_flight[0].batch
            counts = [index not in batch.partial for index in range(len(batch))]
            scheduler.update(in_flight.popleft(), StepResult([7] * sum(counts), list(map(int, counts))))
        scheduler.check()
        tables = [r.block_tables[1][r.num_passed[1] :] for r in scheduler.queues.running]
        seen.held += [len(table) - table.count(UNHELD) for table in tables]
    return seen


@pytest.mark.parametrize("caches", [True, False])
def test_a_request_holds_one_state_and_two_at_the_start_of_a_block(caches: bool) -> None:
    scheduler = make(num_states=20, enable_prefix_caching=caches)
    scheduler.add(request("a", prompt_of(40, 1), 161))
    seen = run(scheduler)
    assert max(seen.held[2:]) == 2
    assert sum(each == 2 for each in seen.held[2:]) <= 2 * 10, "two steps of each block"
    assert seen.held.count(1) >= 130


def test_requests_that_began_together_wait_for_each_others_states() -> None:
    """32 requests come to the ends of their blocks in the same step, with 40 states: 8 go on, others two steps later.
    None of them loses its blocks, and they don't meet again.
    """
    scheduler = make(num_states=40)
    for index in range(32):
        scheduler.add(request(f"r{index}", prompt_of(10, index), 200))
    seen = run(scheduler)
    assert scheduler.stats().num_preemptions == 0
    assert max(seen.batches) == 32
    assert 0 < seen.waited < 60
    assert sum(seen.batches) == 32 * 200
    assert len(seen.batches) < 230


def test_a_request_that_no_other_gives_a_state_preempts_the_last_one() -> None:
    """Each of seven holds one of seven states, and all need a second one."""
    scheduler = make(num_states=9)
    for index in range(7):
        scheduler.add(request(f"r{index}", prompt_of(SIZE - 2, index), 60))
    seen = run(scheduler)
    assert max(seen.batches) > 4
    assert scheduler.stats().num_free_states == 9


def test_states_of_the_cache_give_way_to_requests_and_stay_while_none_needs_them() -> None:
    scheduler = make(num_states=12)
    prompt = prompt_of(SIZE * 6 + 5, 1)
    scheduler.add(request("a", prompt, 40))
    run(scheduler)
    again = request("b", prompt, 4)
    scheduler.add(again)
    run(scheduler)
    assert again.num_cached_tokens == SIZE * 6, "the end of the prompt"
    following = request("c", [*prompt, *[7] * 40, *prompt_of(20, 2)], 4)
    scheduler.add(following)
    run(scheduler)
    assert following.num_cached_tokens == (len(prompt) + 39) // SIZE * SIZE, "the end of the answer"
    for index in range(9):
        scheduler.add(request(f"r{index}", prompt_of(30, 10 + index), 60))
    assert max(run(scheduler).batches) == 9, "no cached state keeps a request from running"
    assert scheduler.stats().num_preemptions == 0
