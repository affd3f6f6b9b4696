"""Results of steps: runs of several tokens, what is reported in columns, and what is taken back."""

from __future__ import annotations

import pytest

from engine.core.batch import EngineOutput, SchedulerOutput, StepOutputs, StepResult, TokenLogprobs
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.replicas.messages import Step, decode_event, encode
from tests.core.test_scheduler import EOS, OTHER, add, make, plan, request, step

IDS = "abcd"


@pytest.fixture
def s() -> Scheduler:
    """Requests that each have two generated tokens, and slots for more."""
    s = make(block_size=16)
    add(s, *(request(name, 20) for name in IDS))
    for _ in range(2):
        step(s)
    return s


def running(s: Scheduler) -> dict[str, Request]:
    return {each.request_id: each for each in s.queues.running}


def expect(s: Scheduler, **more: int) -> SchedulerOutput:
    """Plan a step whose requests may get `more` tokens than one: their KV is computed, as that of drafts would be."""
    output = plan(s)
    for name, count in more.items():
        each = running(s)[name]
        each.num_tokens += count
        each.num_computed_tokens += count
    return output


def update(s: Scheduler, output: SchedulerOutput, **tokens: list[int]) -> StepOutputs:
    runs = [tokens.get(name, [OTHER]) for name in output.batch.request_ids]
    return s.update(output, StepResult([token for run in runs for token in run], [len(run) for run in runs]))


def test_one_token_each_needs_no_counts(s: Scheduler) -> None:
    output = plan(s)
    outputs = update(s, output)
    assert (outputs.request_ids, outputs.token_ids, outputs.counts) == (list(IDS), [OTHER] * 4, [])
    assert outputs.request_ids is output.batch.request_ids, "nothing is copied"


def test_runs_are_in_the_columns(s: Scheduler) -> None:
    before = s.stats().generation_tokens
    outputs = update(s, expect(s, b=2, d=1), b=[4, 5, 6], d=[7, 8])
    assert outputs.outputs == []
    assert (outputs.token_ids, outputs.counts) == ([OTHER, 4, 5, 6, OTHER, 7, 8], [1, 3, 1, 2])
    assert [(each.request_id, each.new_token_ids) for each in outputs] == [
        ("a", [OTHER]),
        ("b", [4, 5, 6]),
        ("c", [OTHER]),
        ("d", [7, 8]),
    ]
    assert running(s)["b"].token_ids[-3:] == [4, 5, 6]
    assert s.stats().generation_tokens - before == 7
    s.check()


def test_a_run_keeps_the_fast_path(s: Scheduler) -> None:
    steady = running(s)["b"].steady_until
    assert steady > 25
    update(s, expect(s, b=2), b=[4, 5, 6])
    assert running(s)["b"].steady_until == steady
    s.check()


def test_a_run_that_fills_a_block_publishes_it(s: Scheduler) -> None:
    update(s, expect(s, b=8), b=[9] * 9)  # 22 + 9 tokens known, 30 computed
    update(s, expect(s, b=1), b=[9] * 2)
    request = running(s)["b"]
    assert (len(request.token_ids), request.num_computed_tokens) == (33, 32)
    assert request.next_commit == 48
    s.check()


def test_a_run_ends_at_a_stop_token(s: Scheduler) -> None:
    outputs = update(s, expect(s, b=3, c=1), b=[4, EOS, 6, 7], c=[8, 9])
    (ended,) = outputs.outputs
    assert (ended.request_id, ended.new_token_ids, ended.finish_reason) == ("b", [4, EOS], "stop")
    assert (outputs.request_ids, outputs.token_ids, outputs.counts) == (
        ["a", "c", "d"],
        [OTHER, 8, 9, OTHER],
        [1, 2, 1],
    )
    s.check()


def test_a_run_ends_at_max_tokens(s: Scheduler) -> None:
    s.abort("b")
    add(s, request("e", 20, max_tokens=5))
    step(s)
    (ended,) = update(s, expect(s, e=3), e=[4, 5, 6, 7]).outputs
    assert (ended.new_token_ids, ended.finish_reason) == ([4, 5, 6, 7], "length")
    s.check()


def test_log_probabilities_of_a_run() -> None:
    s = make(block_size=16)
    add(s, request("a", 20, logprobs=0))
    step(s)
    logprobs = [TokenLogprobs(-float(token), 1, [], []) for token in (4, 5, 6)]
    output = expect(s, a=2)
    outputs = s.update(output, StepResult([4, 5, 6], [3], {0: logprobs}))
    assert (outputs.request_ids, outputs.token_ids, outputs.counts) == ([], [], [])
    (given,) = outputs.outputs
    assert (given.new_token_ids, given.logprobs) == ([4, 5, 6], logprobs)


def test_tokens_and_computed_tokens_are_taken_back_apart(s: Scheduler) -> None:
    expect(s, b=2)
    request = running(s)["b"]
    assert (request.num_tokens, request.num_computed_tokens) == (25, 24)
    s._steps._retract(request, num_tokens=2, num_computed=2)
    assert (request.num_tokens, request.num_computed_tokens, request.steady_until) == (23, 22, 0)
    s._steps._retract(request, num_tokens=1, num_computed=0)
    assert (request.num_tokens, request.num_computed_tokens) == (22, 22), "KV of the newest token stays, as in `defer`"
    with pytest.raises(AssertionError, match="known token"):
        s._steps._retract(request, num_tokens=1, num_computed=0)


def test_counts_cross_the_processes(s: Scheduler) -> None:
    outputs = update(s, expect(s, b=1), b=[4, 5], c=[EOS])
    outputs.outputs.append(EngineOutput("z", [1]))
    event = decode_event(encode(Step(outputs, s.stats())))
    assert isinstance(event, Step)
    assert event.outputs == outputs
    assert event.outputs.counts == [1, 2, 1]
