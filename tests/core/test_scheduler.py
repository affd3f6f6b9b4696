"""Scheduler: who runs, with how many tokens, and what is told to the worker and to the client."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.batch import NOT_FINITE, EngineOutput, SchedulerOutput, StepResult, TokenLogprobs
from engine.core.engine_request import EngineRequest, ImageInput
from engine.core.kv import block_pool, prefix_history
from engine.core.params.pooling import UNSAMPLED, PoolingParams
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler

EOS, OTHER = 0, 9


def make(
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 200,
    enable_prefix_caching: bool = True,
) -> Scheduler:
    return Scheduler(num_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len, enable_prefix_caching)


def request(
    request_id: str, prompt: list[int] | int = 3, salt: str = "", tenant: str = "", **sampling: object
) -> Request:
    """An int makes a prompt of that length which shares no prefix with requests of other ids."""
    tokens = [1000 * ord(request_id[0]) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(**{"max_tokens": 50, **sampling})  # type: ignore[arg-type]
    return Request(EngineRequest(request_id, tokens, params, cache_salt=salt, tenant=tenant), frozenset({EOS}), seed=1)


def add(scheduler: Scheduler, *requests: Request) -> tuple[Request, ...]:
    for r in requests:
        scheduler.add(r)
    return requests


def scheduled(output: SchedulerOutput) -> dict[str, int]:
    """Request id → tokens, in order."""
    return dict(zip(output.batch.request_ids, output.batch.num_tokens, strict=True))


def give(scheduler: Scheduler, output: SchedulerOutput, token: int = OTHER, **tokens: int) -> list[EngineOutput]:
    """Read a step back: `token` for every request, or the one named by its id. The outputs, by request id."""
    batch = output.batch
    sampled = [request_id for index, request_id in enumerate(batch.request_ids) if index not in batch.partial]
    counts = [index not in batch.partial for index in range(len(batch))]
    outputs = scheduler.update(output, StepResult([tokens.get(i, token) for i in sampled], list(map(int, counts))))
    scheduler.check()
    return sorted(outputs, key=lambda outputs: outputs.request_id)


def plan(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.check()
    return output


def step(scheduler: Scheduler, token: int = OTHER, **tokens: int) -> tuple[SchedulerOutput, list[EngineOutput]]:
    """A step that is read back before the next is planned."""
    output = plan(scheduler)
    return output, give(scheduler, output, token, **tokens)


# One step ahead


def test_a_request_is_scheduled_on_while_its_token_is_in_flight() -> None:
    s = make()
    (r,) = add(s, request("a", 3))
    first = plan(s)
    assert scheduled(first) == {"a": 3}
    assert not first.batch.partial
    second = plan(s)
    assert scheduled(second) == {"a": 1}
    assert (r.num_tokens, len(r.token_ids)) == (5, 3)
    [outputs] = give(s, first)
    assert outputs.new_token_ids == [OTHER]
    assert scheduled(plan(s)) == {"a": 1}
    give(s, second)
    assert r.token_ids[3:] == [OTHER, OTHER]


def test_an_end_by_length_wastes_no_share() -> None:
    s = make()
    add(s, request("a", 3, max_tokens=2))
    first, second, third = plan(s), plan(s), None
    assert give(s, first)[0].finish_reason is None
    third = plan(s)
    assert not third, "the last token is in flight"
    assert s.has_work()
    assert give(s, second)[0].finish_reason == "length"
    assert not s.has_work()


def test_the_share_after_an_end_of_text_is_dropped() -> None:
    s = make()
    add(s, request("a"), request("b"))
    first, second = plan(s), plan(s)
    outputs = give(s, first, a=EOS)
    assert [(n.request_id, n.finish_reason, n.stop_reason) for n in outputs] == [("a", "stop", None), ("b", None, None)]
    third = plan(s)
    assert third.removed == ["a"]
    assert list(scheduled(third)) == ["b"]
    assert [n.request_id for n in give(s, second)] == ["b"]
    assert [n.request_id for n in give(s, third)] == ["b"]


def test_has_work_until_the_last_step_is_read() -> None:
    s = make()
    assert not s.has_work()
    add(s, request("a"))
    assert s.has_work()
    first, second = plan(s), plan(s)
    give(s, first, EOS)
    assert s.has_work()
    assert give(s, second) == []
    assert not s.has_work()


def test_steps_are_read_in_order() -> None:
    s = make()
    add(s, request("a"))
    first, second = s.schedule(), s.schedule()
    with pytest.raises(AssertionError, match="too many steps"):
        s.schedule()
    with pytest.raises(AssertionError, match="in the order"):
        s.update(second, StepResult([OTHER], [1]))
    assert first.step < second.step


def test_max_model_len_ends_a_request() -> None:
    s = make(max_model_len=5)
    add(s, request("a", 3, max_tokens=None))
    assert step(s)[1][0].finish_reason is None
    assert step(s)[1][0].finish_reason == "length"


# Budgets and order


def test_a_long_prompt_is_computed_in_chunks() -> None:
    s = make(max_num_batched_tokens=10)
    add(s, request("a", 25))
    outputs = [step(s) for _ in range(4)]
    assert [scheduled(o)["a"] for o, _ in outputs] == [10, 10, 5, 1]
    assert [o.batch.partial for o, _ in outputs] == [[0], [0], [], []]
    assert [len(outputs) for _, outputs in outputs] == [0, 0, 1, 1]


def test_decodes_first_and_chunks_fill_the_budget() -> None:
    s = make(max_num_batched_tokens=10)
    add(s, request("a", 3))
    step(s)
    add(s, request("b", 20), request("c", 3))
    output, _ = step(s)
    assert scheduled(output) == {"a": 1, "b": 9}
    assert (output.batch.num_decodes, output.batch.total_num_tokens) == (1, 10)
    output, _ = step(s)
    assert scheduled(output) == {"a": 1, "b": 9}
    output, _ = step(s)
    assert scheduled(output) == {"a": 1, "b": 2, "c": 3}


def test_one_token_shares_come_first_whatever_they_are() -> None:
    s = make(max_num_batched_tokens=6)
    add(s, request("a", 4), request("b", 1), request("c", 3))
    output, _ = step(s)
    assert scheduled(output) == {"b": 1, "c": 1, "a": 4}
    assert output.batch.partial == [1]
    assert output.batch.num_decodes == 2


def test_max_num_seqs() -> None:
    s = make(max_num_seqs=2)
    add(s, request("a", max_tokens=1), request("b"), request("c"))
    assert list(scheduled(step(s)[0])) == ["a", "b"]
    output, _ = step(s)
    assert output.removed == ["a"]
    assert [a.request_id for a in output.new_requests] == ["c"]
    assert list(scheduled(output)) == ["b", "c"]


def test_nobody_overtakes_the_oldest_waiting() -> None:
    s = make(num_blocks=10, max_model_len=40)
    add(s, request("a", 20, max_tokens=2), request("b", 24, max_tokens=2), request("c", 1))
    assert list(scheduled(step(s)[0])) == ["a"]
    assert list(scheduled(step(s)[0])) == ["a"], "c would fit, but b is older"
    assert list(scheduled(step(s)[0])) == ["c", "b"]


def test_all_finish_when_the_budget_is_smaller_than_the_batch() -> None:
    s = make(max_num_seqs=64, max_num_batched_tokens=16, num_blocks=200, max_model_len=20)
    add(s, *(request(chr(65 + i), 2, max_tokens=8) for i in range(64)))
    finished: list[str] = []
    for _ in range(64 * 10):
        if not s.has_work():
            break
        output, outputs = step(s)
        assert output.batch.total_num_tokens <= 16
        finished += [n.request_id for n in outputs if n.finish_reason]
    assert finished == sorted(finished), "the oldest get on first"
    assert len(finished) == 64


def test_running_requests_share_a_budget_of_one() -> None:
    s = make(max_num_batched_tokens=1)
    add(s, request("a", 2, max_tokens=2), request("b", 1, max_tokens=1))
    assert [scheduled(step(s)[0]) for _ in range(4)] == [{"a": 1}, {"a": 1}, {"a": 1}, {"b": 1}]


# Blocks and preemption


def test_new_blocks_are_told_as_they_come() -> None:
    s = make(block_size=4)
    add(s, request("a", 6))
    output, _ = step(s)
    assert output.new_requests[0].block_ids == [[0, 1]]
    assert output.new_block_ids == {}
    grown = [step(s)[0].new_block_ids for _ in range(7)]
    assert grown == [{}, {}, {"a": [[2]]}, {}, {}, {}, {"a": [[3]]}]


def test_the_youngest_is_preempted() -> None:
    s = make(num_blocks=6, block_size=4, max_model_len=24)
    a, b = add(s, request("a", 8), request("b", 8))
    first = plan(s)
    assert list(scheduled(first)) == ["a", "b"]
    for _ in range(4):
        following = plan(s)
        give(s, first)
        first = following
    assert len(a.block_tables[0]) == len(b.block_tables[0]) == 3
    add(s, request("c", 1))
    output = plan(s)  # a needs a fourth block
    assert scheduled(output) == {"a": 1}
    assert output.removed == ["b"]
    assert output.new_requests == [], "no request is admitted in a step that preempts"
    assert (b.num_preemptions, b.num_computed_tokens, b.block_tables) == (1, 0, [])
    assert [r.request_id for r in s.queues.waiting] == ["b", "c"]
    outputs = give(s, first)
    assert [n.request_id for n in outputs] == ["a", "b"], "the token in flight is kept"
    assert b.token_ids[8:] == [OTHER] * 5


def test_a_preempted_request_resumes_from_the_prefix_cache() -> None:
    s = make(num_blocks=6, block_size=4, max_model_len=24)
    _, b = add(s, request("a", 8, max_tokens=7), request("b", 8, max_tokens=12))
    while not b.num_preemptions:
        step(s)
    assert s.stats().num_preemptions == 1
    output, _ = step(s)
    assert list(scheduled(output)) == ["a"]
    while not s.queues.running or s.queues.running[0] is not b:
        output, _ = step(s)
    [new] = output.new_requests
    assert new.token_ids[:8] == b.token_ids[:8]
    assert new.num_prompt_tokens == 8
    assert new.num_computed_tokens == 8, "the blocks not evicted meanwhile"
    assert s.stats().prefix_hits == 0
    while s.has_work():
        _, outputs = step(s)
    assert (outputs[0].finish_reason, len(b.token_ids)) == ("length", 20)
    assert outputs[0].num_preemptions == 1
    assert outputs[0].num_cached_tokens == 0, "counts the first new only"


def test_the_youngest_gives_way_itself() -> None:
    s = make(num_blocks=5, block_size=4, max_model_len=20)
    a, b = add(s, request("a", 5), request("b", 8))
    while not (a.num_preemptions or b.num_preemptions):
        output, _ = step(s)
    assert a.num_preemptions == 0
    assert list(scheduled(output)) == ["a"]
    assert [r.request_id for r in s.queues.waiting] == ["b"]


def test_a_request_preempted_while_its_last_token_is_in_flight_still_ends() -> None:
    s = make(num_blocks=5, block_size=2, max_model_len=9)
    _, b = add(s, request("a", 3, max_tokens=6), request("b", 4, max_tokens=2))
    first = plan(s)
    second = plan(s)
    give(s, first)
    third = plan(s)  # a needs a third block, b waits for its last token
    assert (b.num_preemptions, list(scheduled(third))) == (1, ["a"])
    outputs = give(s, second)
    assert [(n.request_id, n.finish_reason) for n in outputs] == [("a", None), ("b", "length")]
    assert plan(s).removed == []
    assert third.removed == ["b"]


def test_an_admission_leaves_a_block_for_each_running_request() -> None:
    s = make(num_blocks=6, block_size=4, max_model_len=24)
    add(s, request("a", 8), request("b", 12))
    assert list(scheduled(step(s)[0])) == ["a", "b"], "2 + 3 blocks, and one spare for a"
    s = make(num_blocks=5, block_size=4, max_model_len=20)
    add(s, request("a", 8), request("b", 12))
    assert list(scheduled(step(s)[0])) == ["a"]


def test_a_lone_request_may_use_the_whole_cache() -> None:
    s = make(num_blocks=5, block_size=4, max_model_len=21)
    add(s, request("a", 17, max_tokens=4))
    while s.has_work():
        _, outputs = step(s)
    assert (outputs[0].finish_reason, s.stats().num_preemptions) == ("length", 0)


# Prefix cache


def test_equal_prompts_of_one_step_share_their_blocks() -> None:
    s = make(block_size=4)
    add(s, *(request(name, [*range(10)]) for name in "abcd"))
    output = plan(s)
    assert scheduled(output) == {"a": 10, "b": 2, "c": 2, "d": 2}
    assert s.stats().num_free_blocks == 100 - 2 - 4


def test_the_next_turn_of_a_chat_finds_prompt_and_answer() -> None:
    s = make(block_size=4)
    (r,) = add(s, request("a", 5, max_tokens=30))
    first = plan(s)
    for token in (11, 12, EOS):
        second = plan(s)
        give(s, first, token)
        first = second
    give(s, first)
    assert r.finish_reason == "stop"
    assert len(r.token_ids) == 8
    add(s, request("b", [*r.token_ids, 50, 51, 52]))
    output, [outputs] = step(s)
    assert scheduled(output) == {"b": 3}, (
        "the end of text was computed by the step that was dropped, so its block is full"
    )
    assert outputs.num_cached_tokens == 8
    stats = s.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (5 + 11, 8)
    assert (stats.prompt_tokens, stats.generation_tokens) == (5 + 3, 4)


def test_a_fully_cached_prompt_computes_its_last_block() -> None:
    s = make(block_size=4)
    add(s, request("a", [*range(8)]))
    step(s)
    add(s, request("b", [*range(8)]))
    assert scheduled(step(s)[0])["b"] == 4


def test_cache_salt() -> None:
    s = make(block_size=4)
    add(s, request("a", [*range(9)]), request("b", [*range(9)], salt="x"), request("c", [*range(9)], salt="x"))
    assert scheduled(step(s)[0]) == {"c": 1, "a": 9, "b": 9}


def test_why_a_prefix_was_not_cached() -> None:
    s = make(num_blocks=4)

    def run(request_id: str, prompt: list[int] | int, **more: Any) -> tuple[int, str]:
        add(s, request(request_id, prompt, max_tokens=1, **more))
        _, outputs = step(s)
        assert outputs[0].num_known_tokens == outputs[0].num_cached_tokens
        return outputs[0].num_cached_tokens, outputs[0].prefix_miss

    prompt = [7] * 9
    assert run("a", prompt) == (0, "not_seen")
    assert run("b", prompt) == (8, "")
    assert run("c", prompt[:4]) == (0, ""), "the last token is computed anyway"
    assert run("d", [*prompt[:4], 1, 2, 3, 4, 5]) == (4, "other_tokens")
    assert run("d2", [*prompt[:4], 1, 2, 3, 4, 5, 6, 7, 8, 9]) == (8, "not_seen"), "a longer one goes on there"
    assert run("e", prompt, prompt_logprobs=0) == (0, "not_read")
    assert run("f", prompt, salt="mine") == (0, "not_seen"), "nothing is told of others' salts"
    assert run("g", 16) == (0, "other_tokens")
    add(s, request("h", [*prompt[:8], 1, 2, 3, 4, 5], max_tokens=1))
    (output,) = step(s)[1]
    assert (output.num_cached_tokens, output.num_known_tokens, output.prefix_miss) == (0, 8, "evicted")
    s.reset_prefix_cache()
    assert run("i", prompt) == (0, "not_seen")
    without = make(enable_prefix_caching=False)
    add(without, request("a", prompt))
    assert step(without)[1][0].prefix_miss == "disabled"


def test_the_same_start_with_another_salt() -> None:
    s = make(num_blocks=16)

    def why(request_id: str, salt: str, tenant: str, num_tokens: int = 9) -> str:
        add(s, request(request_id, [7] * num_tokens, max_tokens=1, salt=salt, tenant=tenant))
        return step(s)[1][0].prefix_miss

    assert why("a", "x", "alice") == "not_seen"
    assert why("b", "y", "alice") == "other_salt"
    assert why("c", "y", "alice") == ""
    assert why("d", "z", "bob") == "not_seen", "nothing is told of other tenants"
    assert why("e", "x", "") == "", "cached for all who know the salt"
    assert why("f", "z2", "") == "not_seen", "nor of requests without one"
    assert why("g", "w", "bob", num_tokens=3) == "", "less than a block"


def test_no_more_than_so_many_starts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_history, "MAX_STARTS", 2)
    history = prefix_history.PrefixHistory(1)

    def sent(token_id: int, salt: str) -> bool:
        return history.record_salt(request("a", [token_id], salt=salt, tenant="alice"))

    assert [sent(1, "x"), sent(1, "y"), sent(2, "x"), sent(3, "x")] == [False, True, False, False]
    assert [sent(1, "x"), sent(3, "y")] == [False, True], "the oldest was forgotten"


def test_no_more_than_so_many_evicted_blocks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "MAX_EVICTED", 3)
    pool = block_pool.BlockPool(1)
    names = [bytes([i]) for i in range(20)]
    for name in names:
        pool.publish(0, name, *pool.take(1))
        pool.release([0])
    known = [name for name in names if pool.was_cached(name)]
    assert known[-4:] == names[-4:]
    assert len(known) <= 2 * 4


def test_no_prefix_caching() -> None:
    s = make(block_size=4, enable_prefix_caching=False)
    add(s, request("a", [*range(9)]), request("b", [*range(9)]))
    assert scheduled(step(s)[0]) == {"a": 9, "b": 9}
    assert (s.stats().prefix_queries, s.stats().prefix_hits) == (0, 0)


def test_reset_prefix_cache() -> None:
    s = make(block_size=4)
    add(s, request("a", [*range(9)], max_tokens=1))
    output = plan(s)
    assert not s.reset_prefix_cache()
    give(s, output)
    assert s.reset_prefix_cache()
    add(s, request("b", [*range(9)]))
    assert scheduled(step(s)[0]) == {"b": 9}


# Coming and going


def test_admission_tells_all_and_is_a_copy() -> None:
    s = make(block_size=4)
    (r,) = add(s, request("a", 6, temperature=0.5))
    first = plan(s)
    [new] = first.new_requests
    assert (new.request_id, new.token_ids, new.num_prompt_tokens) == ("a", r.token_ids, 6)
    assert (new.num_computed_tokens, new.block_ids) == (0, [[0, 1]])
    assert (new.request.sampling.temperature, new.seed) == (0.5, 1)
    tokens, block_ids = list(new.token_ids), [list(new.block_ids[0])]
    give(s, first)
    for _ in range(5):
        step(s)
    assert (new.token_ids, new.block_ids) == (tokens, block_ids)


def test_add_refuses_what_can_never_run() -> None:
    s = make(num_blocks=4, block_size=4, max_model_len=20)
    with pytest.raises(ValueError, match=r"prompt has 0 tokens.* from 1 to 19"):
        s.add(request("a", 0))
    with pytest.raises(ValueError, match=r"prompt has 20 tokens.* from 1 to 19.*max_model_len=20"):
        s.add(request("a", 20))
    with pytest.raises(ValueError, match=r"10 tokens with max_tokens=8 .* cache of 16 tokens; max_tokens=7 would fit"):
        s.add(request("a", 10, max_tokens=8))
    with pytest.raises(ValueError, match=r"10 tokens with max_tokens=10 .* max_tokens=7 would fit"):
        s.add(request("a", 10, max_tokens=None))
    with pytest.raises(ValueError, match=r"18 tokens .* a prompt of 16 tokens would fit"):
        s.add(request("a", 18, max_tokens=1))
    assert not s.has_work()
    s.add(request("a", 10, max_tokens=7))
    with pytest.raises(ValueError, match="'a' is in use"):
        s.add(request("a"))
    s.add(request("b", 16, max_tokens=1))
    while s.has_work():
        step(s)


def test_abort_a_waiting_request() -> None:
    s = make(max_num_seqs=1)
    _, b = add(s, request("a"), request("b"))
    step(s)
    assert s.abort("b")
    assert not s.abort("b")
    assert not s.abort("never heard of")
    s.check()
    assert b.finish_reason == "abort"
    assert step(s)[0].removed == [], "it had no row"


def test_abort_a_running_request_with_two_steps_in_flight() -> None:
    s = make()
    add(s, request("a"), request("b"))
    first, second = plan(s), plan(s)
    assert s.abort("a")
    assert not s.abort("a")
    s.check()
    assert [n.request_id for n in give(s, first)] == ["b"]
    third = plan(s)
    assert third.removed == ["a"]
    assert [n.request_id for n in give(s, second)] == ["b"]
    assert s.stats().num_free_blocks == 100 - 2


def test_an_id_may_be_used_again_while_its_old_token_is_in_flight() -> None:
    s = make()
    add(s, request("a", 3))
    first = plan(s)
    s.abort("a")
    (again,) = add(s, request("a", 2))
    second = plan(s)
    assert second.removed == ["a"]
    assert scheduled(second) == {"a": 2}
    assert give(s, first, 77) == []
    assert again.token_ids[2:] == []
    give(s, second, 78)
    assert again.token_ids[2:] == [78]


def test_abort_a_preempted_request() -> None:
    s = make(num_blocks=5, block_size=4, max_model_len=20)
    _, b = add(s, request("a", 5), request("b", 8))
    while not b.num_preemptions:
        output = plan(s)
        if not b.num_preemptions:
            give(s, output)
    assert output.removed == ["b"]
    assert s.abort("b")
    s.check()
    give(s, output)
    assert step(s)[0].removed == []


def test_rows_to_free_are_told_with_the_next_step_that_runs() -> None:
    s = make()
    add(s, request("a", max_tokens=1))
    step(s)
    idle = plan(s)
    assert not idle
    assert (idle.removed, idle.new_requests, idle.batch.total_num_tokens) == ([], [], 0)
    add(s, request("b"))
    assert plan(s).removed == ["a"]


def test_news_carry_the_request_s_history() -> None:
    s = make(max_num_seqs=1)
    a, b = add(s, request("a", max_tokens=2), request("b", max_tokens=1))
    _, [outputs] = step(s)
    assert 0 < outputs.queued_time == a.queued_time <= outputs.scheduled_time == a.scheduled_time
    step(s)
    _, [outputs] = step(s)
    assert a.scheduled_time <= outputs.scheduled_time == b.scheduled_time
    assert (outputs.num_preemptions, outputs.num_cached_tokens, outputs.logprobs) == (0, 0, None)


def test_logprobs_reach_their_request() -> None:
    s = make(max_num_batched_tokens=8)
    add(s, request("a", 2), request("b", 2, logprobs=1), request("c", 9))
    output = s.schedule()
    entry = TokenLogprobs(-0.5, 1, [OTHER], [-0.5])
    index = output.batch.request_ids.index("b")
    outputs = s.update(
        output, StepResult([OTHER, OTHER], [0 if i in output.batch.partial else 1 for i in range(3)], {index: [entry]})
    )
    assert {n.request_id: n.logprobs for n in outputs.outputs} == {"a": None, "b": [entry]}


def test_stats_of_the_queues() -> None:
    s = make(max_num_seqs=2, num_blocks=10, max_model_len=40)
    add(s, *(request(name, 4) for name in "abc"))
    step(s)
    stats = s.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.num_blocks, stats.num_free_blocks) == (10, 8)
    assert stats.kv_cache_usage == pytest.approx(0.2)
    assert (stats.prompt_tokens, stats.generation_tokens) == (8, 2)


# NaN


def _fail_with_nan(s: Scheduler, name: str) -> None:
    output = plan(s)
    (failed,) = (each for each in give(s, output, **{name: NOT_FINITE}) if each.finish_reason)
    assert (failed.request_id, failed.finish_reason) == (name, "error")


def _num_cached(s: Scheduler, name: str, prompt: list[int]) -> int:
    (r,) = add(s, request(name, prompt, max_tokens=1))
    step(s)
    return r.num_cached_tokens


def test_blocks_of_a_request_with_nan_may_be_held_by_others() -> None:
    s, prompt = make(), list(range(1, 13))
    add(s, request("a", [*prompt, 50]))
    step(s)
    others = add(s, request("b", [*prompt, 60]), request("c", [*prompt, 61]))
    _fail_with_nan(s, "a")
    assert [each.num_cached_tokens for each in others] == [12, 12]
    step(s)
    assert _num_cached(s, "d", [*prompt, 62]) == 0, "what `a` computed may hold NaN"
    for each in others:
        s.abort(each.request_id)
        s.check()
    assert s.blocks.num_free_blocks == s.blocks.num_blocks


def test_a_request_with_nan_leaves_the_cached_prefix_that_it_has_sampled_with() -> None:
    s, prompt = make(), list(range(1, 13))
    add(s, request("a", [*prompt, 50]))
    step(s)
    add(s, request("b", [*prompt, 60, 61, 62, 63, 64]))
    step(s)
    _fail_with_nan(s, "b")
    assert _num_cached(s, "c", [*prompt, 60, 61, 62, 63, 64]) == 12, "without the block that `b` computed"


def test_a_request_whose_first_token_is_nan_leaves_nothing_that_may_be_the_cause() -> None:
    s, prompt = make(), list(range(1, 13))
    add(s, request("a", [*prompt, 50]))
    step(s)
    s.abort("a")
    add(s, request("b", [*prompt, 60]))
    _fail_with_nan(s, "b")
    assert _num_cached(s, "c", [*prompt, 61]) == 0


# Whole prompts, of encoders


def embedding(request_id: str, length: int) -> Request:
    prompt = [1000 * ord(request_id[0]) + i for i in range(length)]
    return Request(EngineRequest(request_id, prompt, UNSAMPLED, PoolingParams()), frozenset({EOS}), seed=1)


def test_a_whole_prompt_waits_for_a_step_with_room() -> None:
    s = Scheduler(100, 4, 8, 64, 200, False, whole_prompts=True)
    add(s, embedding("a", 40), embedding("b", 30), embedding("c", 20), embedding("d", 44))
    assert scheduled(plan(s)) == {"a": 40}
    assert scheduled(plan(s)) == {"b": 30, "c": 20}  # in order: d does not fit any more


def test_a_prompt_has_room_in_a_step_of_its_own() -> None:
    """However short the step is to be, as after a lack of memory."""
    s = Scheduler(100, 4, 8, 64, 200, False, whole_prompts=True)
    s.max_num_batched_tokens = 8
    add(s, embedding("a", 64), embedding("b", 5), embedding("c", 3))
    first = plan(s)
    assert scheduled(first) == {"a": 64}
    assert scheduled(plan(s)) == {"b": 5, "c": 3}
    assert not first.batch.partial


# Images whose tokens see each other


def with_image(request_id: str, length: int, start: int, stop: int) -> Request:
    image = ImageInput(start, stop - start, (1, stop - start), b"", "", sees_both_ways=True)
    prompt = [1000 * ord(request_id[0]) + i for i in range(length)]
    return Request(
        EngineRequest(request_id, prompt, SamplingParams(max_tokens=50), images=(image,)), frozenset(), seed=1
    )


def test_no_chunk_ends_within_an_image() -> None:
    s = Scheduler(100, 4, 8, 10, 200)
    add(s, with_image("a", 16, 7, 16), request("b", 4))
    assert scheduled(step(s)[0]) == {"a": 7, "b": 3}, "another request takes what is left"
    assert scheduled(step(s)[0]) == {"a": 9, "b": 1}
    assert scheduled(step(s)[0]) == {"a": 1, "b": 1}


def test_an_image_has_room_however_short_the_step_is_to_be() -> None:
    s = Scheduler(100, 4, 8, 64, 200)
    add(s, request("b", 4))
    step(s)
    s._budget.num_tokens = lambda *_: 3  # type: ignore[method-assign]
    add(s, with_image("a", 40, 5, 25))
    assert [scheduled(step(s)[0]) for _ in range(4)] == [
        {"b": 1, "a": 2}, {"b": 1, "a": 2}, {"b": 1, "a": 1}, {"b": 1, "a": 20},
    ]  # fmt: skip
    small = Scheduler(100, 4, 8, 6, 200)  # as after a lack of memory
    add(small, with_image("a", 12, 0, 9), request("b", 4))
    assert scheduled(plan(small)) == {"a": 9}
