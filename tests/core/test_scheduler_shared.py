"""Answers to one prompt share its blocks, and priorities decide queue order."""

from __future__ import annotations

import random

import pytest

from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from tests.support.toy import Launched, ToyRunner, single_answer

VOCAB = 50


def request(name: str, prompt: list[int], *, max_tokens: int = 20, priority: int = 0, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)  # type: ignore[arg-type]
    return Request(EngineRequest(name, prompt, sampling, priority=priority), frozenset(), seed=0)


def run(
    scheduler: Scheduler, runner: ToyRunner, requests: list[Request], in_flight: Launched | None = None
) -> list[str]:
    """All to the end, one step ahead; who finished, in order. The toy asserts that each reads its own prefix's KV."""
    finished: list[str] = []
    while scheduler.has_work():
        output = scheduler.schedule()
        launched = runner.launch(output) if output else None
        if in_flight is not None:
            finished += [outputs.request_id for outputs in scheduler.update(*in_flight.read()) if outputs.finish_reason]
        in_flight = launched
        scheduler.check()
    for each in requests:
        answer, *_ = single_answer(each.token_ids[: each.num_prompt_tokens], each.sampling, frozenset(), 0, 4096, VOCAB)
        assert each.token_ids[each.num_prompt_tokens :] == answer
    return finished


@pytest.mark.parametrize("budget", [8192, 1000, 256, 100])
@pytest.mark.parametrize("num_prompt", [1000, 1008])
def test_eight_answers_use_the_prompts_blocks_once(budget: int, num_prompt: int) -> None:
    """However the prompt is cut: each answer adds the one block that it will write to."""
    scheduler = Scheduler(1000, 16, 64, budget, 4096)
    runner = ToyRunner(1000, 16, 64, budget, VOCAB)
    prompt = list(range(num_prompt))
    siblings = [request(f"a-{i}", prompt, max_tokens=1 + 16 - num_prompt % 16) for i in range(8)]
    for each in siblings:
        scheduler.add(each)
    in_flight = None
    most = 0
    while scheduler.has_work():
        output = scheduler.schedule()
        launched = runner.launch(output) if output else None
        if len(scheduler.queues.running) == 8:
            held = {block_id for each in siblings for block_id in each.block_tables[0]}
            most = max(most, len(held))
            shared = set.intersection(*(set(each.block_tables[0]) for each in siblings))
            assert len(shared) == (num_prompt - 1) // 16
        if in_flight is not None:
            scheduler.update(*in_flight.read())
        in_flight = launched
        scheduler.check()
    assert most <= (num_prompt - 1) // 16 + 8 * 2
    computed = scheduler.stats().prompt_tokens
    assert computed == num_prompt + 7 * (num_prompt - (num_prompt - 1) // 16 * 16)


def test_lower_priorities_come_first() -> None:
    scheduler = Scheduler(100, 4, 1, 64, 256)
    runner = ToyRunner(100, 4, 1, 64, VOCAB)
    priorities = [5, 0, -3, 5, 0, 7, -3]
    requests = [request(str(i), [i, 2, 3], priority=p) for i, p in enumerate(priorities)]
    for each in requests:
        scheduler.add(each)
        scheduler.check()
    assert [r.request_id for r in scheduler.queues.waiting] == ["2", "6", "1", "4", "0", "3", "5"]
    assert run(scheduler, runner, requests) == ["2", "6", "1", "4", "0", "3", "5"]


def test_the_least_urgent_is_preempted() -> None:
    scheduler = Scheduler(12, 4, 8, 64, 48)
    runner = ToyRunner(12, 4, 8, 64, VOCAB)
    requests = [request("late", [1] * 8, priority=9), request("soon", [2] * 8), request("now", [3] * 8, priority=-1)]
    for each in requests:
        scheduler.add(each)
    assert run(scheduler, runner, requests)[-1] == "late"
    assert requests[2].num_preemptions == 0
    assert requests[0].num_preemptions > 0


@pytest.mark.parametrize("seed", range(40))
def test_random_priorities(seed: int) -> None:
    """Tiny caches, requests that come while others run, aborts: every answer is right, nothing is lost."""
    rng = random.Random(seed)
    size, blocks, rows = rng.choice([1, 4]), rng.randrange(16, 60), rng.randrange(1, 6)
    budget = rng.choice([rows, 16, 64])
    longest = min(size * blocks, 64)
    scheduler, runner = Scheduler(blocks, size, rows, budget, longest), ToyRunner(blocks, size, rows, budget, VOCAB)
    requests: list[Request] = []
    aborted: set[str] = set()
    in_flight = None
    for number in range(400):
        if number < 60 and rng.random() < 0.5:
            num_prompt = rng.randrange(1, longest - 1)
            new = request(
                str(number),
                [rng.randrange(2) for _ in range(num_prompt)],
                max_tokens=rng.randrange(1, longest - num_prompt + 1),
                priority=rng.randrange(-2, 3),
            )
            scheduler.add(new)
            requests.append(new)
        if requests and rng.random() < 0.05:
            name = rng.choice(requests).request_id
            if scheduler.abort(name):
                aborted.add(name)
        output = scheduler.schedule()
        launched = runner.launch(output) if output else None
        if in_flight is not None:
            scheduler.update(*in_flight.read())
        in_flight = launched
        scheduler.check()
    done = [each for each in requests if each.request_id not in aborted]
    run(scheduler, runner, [], in_flight)
    for each in done:
        answer, *_ = single_answer(
            each.token_ids[: each.num_prompt_tokens], each.sampling, frozenset(), 0, longest, VOCAB
        )
        assert each.token_ids[each.num_prompt_tokens :] == answer
    assert scheduler.stats().num_free_blocks == blocks
