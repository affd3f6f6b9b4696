"""Steps that fail: the request that is to blame ends with an error, and all others get what they get without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core.batch import EngineOutput, SchedulerOutput
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.errors import EngineError
from engine.stepping import recovery
from engine.stepping.recovery import MAX_UNEXPLAINED
from engine.worker.forward_pass import ForwardPass
from tests.engine import test_special_sampling as special
from tests.engine.test_structured_outputs import ASKED, Loop, params
from tests.support.fake_runner import FakeRunner, next_token

Fault = Callable[[SchedulerOutput], None]


class Workload:
    """An engine over the fake runner, and what its requests got."""

    def __init__(self, model: Path, **settings: Any) -> None:
        config = EngineConfig(model=str(model), device="cpu", max_model_len=256, debug_checks=True, **settings)
        self.engine = Engine(config, build_runner=FakeRunner.build)  # type: ignore[arg-type]
        assert isinstance(self.engine.runner, FakeRunner)
        self.runner: FakeRunner = self.engine.runner
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.final: dict[str, EngineOutput] = {}

    def add(self, request_id: str, length: int = 9, max_tokens: int = 12) -> None:
        self.prompts[request_id] = [len(self.prompts) + 1] * length
        self.tokens[request_id] = []
        self.engine.add_request(
            EngineRequest(request_id, self.prompts[request_id], SamplingParams(max_tokens=max_tokens))
        )

    def step(self) -> None:
        for output in self.engine.step():
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.final[output.request_id] = output

    def run(self) -> None:
        steps = 0
        while self.engine.has_work():
            self.step()
            steps += 1
            assert steps < 5000
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks

    def check_complete(self, request_ids: Iterable[str], max_tokens: int = 12) -> None:
        for request_id in request_ids:
            prompt = self.prompts[request_id]
            expected = [next_token(prompt, position) for position in range(len(prompt), len(prompt) + max_tokens)]
            assert self.tokens[request_id] == expected, request_id
            assert self.final[request_id].finish_reason == "length"

    def failed(self) -> dict[str, str]:
        return {name: output.error for name, output in self.final.items() if output.finish_reason == "error"}


def fails_with(*culprits: str, error: type[Exception] = IndexError) -> Fault:
    """Whatever step one of them is in."""

    def fault(output: SchedulerOutput) -> None:
        if set(culprits) & set(output.batch.request_ids):
            raise error("it cannot be computed")

    return fault


def out_of_memory_beyond(num_tokens: int) -> Fault:
    def fault(output: SchedulerOutput) -> None:
        if output.batch.total_num_tokens > num_tokens:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    return fault


@pytest.mark.parametrize("where", ["launch_fault", "read_fault"])
@pytest.mark.parametrize("culprits", [("0",), ("5",), ("11",), ("2", "3", "9")])
def test_only_the_request_to_blame_ends(tiny_model: Path, where: str, culprits: tuple[str, ...]) -> None:
    workload = Workload(tiny_model, max_num_seqs=8)
    for i in range(12):
        workload.add(str(i))
    workload.step()
    setattr(workload.runner, where, fails_with(*culprits))
    workload.run()
    reason = "an internal error (IndexError); see the server's log"
    assert workload.failed() == dict.fromkeys(culprits, reason)
    workload.check_complete(set(workload.prompts) - set(culprits))


@pytest.mark.parametrize("num_requests", [1, 2, 6])
def test_a_failure_that_does_not_come_again_costs_no_request_its_answer(tiny_model: Path, num_requests: int) -> None:
    workload = Workload(tiny_model)
    for i in range(num_requests):
        workload.add(str(i))
    for _ in range(4):
        workload.step()

    def once(output: SchedulerOutput) -> None:
        workload.runner.launch_fault = None
        raise RuntimeError("a cosmic ray")

    workload.runner.launch_fault = once
    workload.run()
    assert workload.failed() == {}
    workload.check_complete(workload.prompts)


def test_failures_long_past_do_not_end_the_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "QUIET_STEPS", 20)
    workload = Workload(tiny_model, num_gpu_blocks_override=200)
    workload.add("a", max_tokens=200)
    num_steps = 0

    def rarely(output: SchedulerOutput) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 25 == 0:
            raise RuntimeError("a cosmic ray")

    workload.runner.launch_fault = rarely
    workload.run()
    assert workload.runner.num_resets > MAX_UNEXPLAINED
    workload.check_complete(["a"], max_tokens=200)


def test_a_step_that_is_too_large_for_memory_is_divided(tiny_model: Path) -> None:
    workload = Workload(tiny_model, max_num_batched_tokens=2048, max_num_seqs=32, num_gpu_blocks_override=600)
    for i in range(10):
        workload.add(str(i), length=200)
    workload.runner.launch_fault = out_of_memory_beyond(1100)
    workload.run()
    assert workload.failed() == {}
    workload.check_complete(workload.prompts)
    assert workload.engine.scheduler.max_num_batched_tokens == 1024, "it stays so"


def test_a_request_that_is_too_large_for_memory_in_small_steps_too_ends(tiny_model: Path) -> None:
    workload = Workload(tiny_model, max_num_batched_tokens=2048, max_num_seqs=8)
    for i in range(4):
        workload.add(str(i))
    workload.runner.launch_fault = fails_with("2", error=torch.OutOfMemoryError)
    workload.run()
    assert workload.failed() == {"2": "the request needs more memory than is available"}
    workload.check_complete(["0", "1", "3"])
    assert workload.engine.scheduler.max_num_batched_tokens == 2048, "the others have nothing to do with it"


def test_requests_come_and_go_meanwhile(tiny_model: Path) -> None:
    workload = Workload(tiny_model)
    for i in range(8):
        workload.add(str(i))
    workload.runner.launch_fault = fails_with("6")
    workload.step()
    workload.add("new")
    with pytest.raises(ValueError, match="'new' is in use"):
        workload.add("new")
    assert workload.engine.stats().num_deferred > 0
    assert workload.engine.abort("0"), "it runs now"
    assert workload.engine.abort("7"), "it waits"
    assert not workload.engine.abort("7")
    workload.prompts["new"] = [9] * 9
    workload.run()
    assert workload.failed().keys() == {"6"}
    assert workload.tokens["7"] == []
    workload.check_complete(["1", "2", "3", "4", "5", "new"])


def test_the_cache_forgets_what_a_failed_step_was_to_write(tiny_model: Path) -> None:
    workload = Workload(tiny_model)
    workload.add("a", length=100, max_tokens=2)
    workload.runner.launch_fault = fails_with("a")
    workload.run()
    assert workload.failed().keys() == {"a"}
    pool = workload.engine.scheduler.blocks.pools.pools[0]
    assert len(pool.free_and_empty()) == pool.num_blocks


def test_what_no_request_explains_ends_the_engine(tiny_model: Path) -> None:
    workload = Workload(tiny_model)
    for i in range(2):
        workload.add(str(i), max_tokens=200)

    def together(output: SchedulerOutput) -> None:
        if len(output.batch) == 2:
            raise RuntimeError("they do not like each other")

    workload.runner.launch_fault = together
    with pytest.raises(EngineError, match="none of their requests fails alone"):
        workload.run()
    assert workload.runner.num_resets >= 2 * MAX_UNEXPLAINED


def test_a_device_that_is_broken_ends_the_engine(tiny_model: Path) -> None:
    workload = Workload(tiny_model)
    workload.add("a")
    workload.runner.launch_fault = fails_with("a")
    workload.runner.reset_fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        workload.run()


@pytest.mark.parametrize("seed", range(12))
def test_any_workload_with_any_faults(tiny_model: Path, seed: int) -> None:
    rng = random.Random(seed)
    settings = {"max_num_seqs": rng.choice([3, 16]), "max_num_batched_tokens": rng.choice([16, 64, 512])}
    workload = Workload(tiny_model, num_gpu_blocks_override=rng.choice([24, 200]), **settings)
    names = [str(i) for i in range(20)]
    culprits = set(rng.sample(names, rng.randrange(4)))
    faults = fails_with(*culprits), fails_with(*rng.sample(names, 2))
    aborted: set[str] = set()
    left = names.copy()
    while left or workload.engine.has_work():
        if left and rng.random() < 0.3:
            workload.add(left.pop(0), length=rng.randrange(1, 60))
        if rng.random() < 0.05 and workload.prompts:
            name = rng.choice(list(workload.prompts))
            if workload.engine.abort(name):
                aborted.add(name)
        transient = faults[1] if rng.random() < 0.03 else None
        workload.runner.launch_fault = transient or faults[0]
        workload.step()
    assert workload.failed().keys() >= culprits - aborted
    workload.check_complete(set(names) - workload.failed().keys() - aborted)


def test_answers_of_the_real_runner_do_not_change(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties, seeds, masks of grammars and log-probabilities, through failures at all kinds of moments."""

    def answers(fault_at: set[int]) -> dict[str, list[int]]:
        loop = Loop(tiny_model, max_num_seqs=8)
        forward, count = ForwardPass._layers, 0

        def failing(self: ForwardPass, *args: Any) -> Any:
            nonlocal count
            count += 1
            if count in fault_at:
                raise RuntimeError("it comes and goes")
            return forward(self, *args)

        monkeypatch.setattr(ForwardPass, "_layers", failing)
        for i, fields in enumerate(special.SPECIAL):
            loop.add(f"special-{i}", SamplingParams(max_tokens=30, **fields), [i + 1] * 20)
        for i, asked in enumerate(ASKED):
            loop.add(f"guided-{i}", params(seed=i, **asked))
        loop.add("scored", SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=2, seed=3), [7] * 40)
        tokens = loop.run()
        assert {loop.ended(name) for name in tokens} <= {"stop", "length"}
        monkeypatch.setattr(ForwardPass, "_layers", forward)
        loop.engine.close()
        return tokens

    assert answers({1, 9, 40}) == answers(set())
