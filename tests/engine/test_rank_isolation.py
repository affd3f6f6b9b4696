"""Steps that fail on several ranks: the request to blame ends, the others get what they get without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.config import EngineConfig
from engine.core.batch import SchedulerOutput
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.models.shard import Stage
from engine.worker.model_runner import ModelRunner
from engine.worker.parallel import ranks
from engine.worker.parallel.communicator import GroupCommunicator, StageLink
from engine.worker.parallel.losses import Losses
from engine.worker.step_handle import StepHandle
from engine.worker.step_sampling import StepSampling
from tests.engine.test_structured_outputs import ASKED, Loop, params

SOUND_STEPS = 3  # of the culprit, before its steps fail
METHODS = {  # in a step → method that raises
    "before": (ModelRunner, "update_rows"),
    "amid": (GroupCommunicator, "all_reduce"),
    "handing over": (StageLink, "received"),
    "sampling": (StepSampling, "begin"),
    "masks": (StepHandle, "sample"),
}


def make_fail(patch: pytest.MonkeyPatch, where: str, who: str, fails_always: bool) -> None:
    """Let a place of the culprit's steps fail on rank 0, the others, or all."""
    parent, launch, count = os.getpid(), ModelRunner.launch, 0
    is_due = False
    owner, name = METHODS[where]
    inner = getattr(owner, name)

    def launching(self: ModelRunner, output: SchedulerOutput) -> Any:
        nonlocal count, is_due
        is_due = False
        if "culprit" in output.batch.request_ids:
            count += 1
            is_due = count > SOUND_STEPS if fails_always else count == SOUND_STEPS
        return launch(self, output)

    def failing(*args: Any) -> Any:
        nonlocal is_due
        is_own = who == "all" or (os.getpid() == parent) == (who == "rank 0")
        if is_due and is_own:
            is_due = False
            raise IndexError("it cannot be computed")
        return inner(*args)

    patch.setattr(ModelRunner, "launch", launching)
    patch.setattr(owner, name, failing)


def outputs(engine: Engine, names: list[str]) -> dict[str, tuple[list[int], str | None]]:
    """Return the tokens and the finish reason of each request. Half of them share a prefix of two blocks."""
    for i, name in enumerate(names):
        prompt = [7] * 16 + [20 + i] * 5 if i % 2 else [30 + i] * (3 + 4 * i)
        sampling = SamplingParams(max_tokens=9, temperature=0.8, seed=i, repetition_penalty=1.2, ignore_eos=True)
        engine.add_request(EngineRequest(name, prompt, sampling))
    found: dict[str, tuple[list[int], str | None]] = {name: ([], None) for name in names}
    while engine.has_work():
        for output in engine.step():
            tokens, _ = found[output.request_id]
            found[output.request_id] = tokens + output.new_token_ids, output.finish_reason
    return found


def start(model: Path, **settings: Any) -> Engine:
    return Engine(
        EngineConfig(
            model=str(model), device="cpu", dtype="float32", max_num_seqs=8, max_model_len=64, block_size=8,
            max_num_batched_tokens=32, num_gpu_blocks_override=40, debug_checks=True, **settings,
        )
    )  # fmt: skip


NAMES = ["a", "culprit", "b", "c"]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Iterator[dict[str, tuple[list[int], str | None]]]:
    engine = start(tiny_model)
    yield outputs(engine, NAMES)
    engine.close()


TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("settings", "where", "who"),
    [
        *((TENSOR, where, who) for where in ("before", "amid") for who in ("all", "rank 0", "rank 1")),
        (TENSOR, "sampling", "all"),
        *((PIPELINE, "before", who) for who in ("all", "rank 0", "rank 1")),
        (PIPELINE, "handing over", "rank 0"),
    ],
)
@pytest.mark.usefixtures("forked")
def test_a_failed_step_is_dropped_on_all_ranks(
    tiny_model: Path,
    expected: dict[str, tuple[list[int], str | None]],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, int],
    where: str,
    who: str,
) -> None:
    make_fail(monkeypatch, where, who, fails_always=True)
    with closing(start(tiny_model, **settings)) as engine:
        for _ in range(2):  # in the same processes, and with what is cached
            found = outputs(engine, NAMES)
            assert found.pop("culprit")[1] == "error"
            assert found == {name: expected[name] for name in found}


@pytest.mark.parametrize("settings", [TENSOR, PIPELINE])
@pytest.mark.usefixtures("forked")
def test_a_fault_that_does_not_come_again(
    tiny_model: Path,
    expected: dict[str, tuple[list[int], str | None]],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, int],
) -> None:
    make_fail(monkeypatch, "before", "rank 1", fails_always=False)
    with closing(start(tiny_model, **settings)) as engine:
        assert outputs(engine, NAMES) == expected


@pytest.mark.parametrize("who", ["all", "rank 0", "rank 1"])
@pytest.mark.usefixtures("forked")
def test_a_failure_when_guided_requests_are_sampled(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    settings = {"max_num_seqs": 4, "num_gpu_blocks_override": 80, "enable_prefix_caching": False}
    names = ["a", "culprit", "b"]

    def answers(loop: Loop) -> dict[str, list[int]]:
        with closing(loop.engine):
            for i, name in enumerate(names):
                loop.add(name, params(seed=i, **ASKED[0]))
            tokens = loop.run()
            ends = {name: loop.ended(name) for name in names}
        assert ends == dict.fromkeys(names, "stop") or ends.pop("culprit") == "error"
        assert set(ends.values()) == {"stop"}
        return tokens

    expected = answers(Loop(tiny_model, **settings))
    make_fail(monkeypatch, "masks", who, fails_always=True)
    found = answers(Loop(tiny_model, tensor_parallel_size=2, **settings))
    assert len(found.pop("culprit")) < len(expected.pop("culprit"))
    assert found == expected


class Follower:
    """A stand-in for a rank's runner and its connections, for `FollowedSteps`."""

    def __init__(self, are_renewed: bool, survive_failures: bool) -> None:
        self.are_renewed, self.survive_failures = are_renewed, survive_failures
        self.num_left = self.num_resets = 0
        self.batch = self
        build: Any = SimpleNamespace(rank=1, shard=SimpleNamespace(rank=1), stage=Stage(0, 1))
        self.steps = ranks.FollowedSteps(build, cast(Any, self), cast(Any, self))

    def leave(self) -> None:
        self.num_left += 1

    def renew(self, url: str) -> None: ...

    def reset(self) -> None:
        self.num_resets += 1

    def set_newest(self, sampled: dict[str, list[int]]) -> None: ...

    def launch(self, output: SchedulerOutput) -> Any:
        raise IndexError("it cannot be computed")


LAUNCH = ranks.Launch(SchedulerOutput(1, [], ranks.NO_BATCH, {}, []), False, {})


def test_a_rank_of_gpus_that_fails_alone_ends() -> None:
    """Rank 0 goes on, and would wait for it forever."""
    follower = Follower(are_renewed=False, survive_failures=True)
    follower.steps.run(LAUNCH)
    with pytest.raises(RuntimeError, match="on this rank alone"):
        follower.steps.run(LAUNCH)
    follower.steps.reset("")
    follower.steps.run(LAUNCH)
    assert follower.num_resets == 1


def test_a_rank_of_cpus_that_fails_waits_until_all_have_left() -> None:
    follower = Follower(are_renewed=True, survive_failures=True)
    for _ in range(3):
        follower.steps.run(LAUNCH)
    assert follower.num_left == 1
    assert follower.steps.have_failed
    follower.steps.reset("")
    assert not follower.steps.have_failed


def test_a_stage_on_a_gpu_that_fails_ends() -> None:
    with pytest.raises(IndexError):
        Follower(are_renewed=False, survive_failures=False).steps.run(LAUNCH)


def test_rank_0_gives_up_ranks_that_do_not_leave_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(ranks, "end_without", lambda follower, how, lost: ended.append((follower, how)))
    runner = object.__new__(ranks.RankedRunner)
    runner._unreset, runner._losses = [cast(Any, "rank 2")], Losses(lambda reason: None)
    runner._give_up()
    assert ended == [("rank 2", "did not leave a failed step within 60 s")]
