"""Tensor parallelism with real processes, over gloo: two ranks answer as one does."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.structured import StructuredOutputs
from engine.errors import ConfigError, EngineDeadError
from engine.models.errors import ModelError
from engine.worker.parallel import ranks as ranks_module
from engine.worker.parallel.losses import Losses
from server.observability.readiness import Readiness

PROMPTS = ["Once upon a time", "The cat", "What is Quire?", "Once upon a time there was", "A", "Two plus two"]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
KINDS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
    "samples": SamplingParams(max_tokens=16, temperature=1.0, seed=5, n=3),
    "filters": SamplingParams(max_tokens=16, temperature=0.9, seed=6, top_k=20, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(max_tokens=24, temperature=0, repetition_penalty=1.3, frequency_penalty=0.4),
    "a grammar": SamplingParams(
        max_tokens=24, temperature=1.0, seed=7, structured_outputs=StructuredOutputs(json=PERSON)
    ),
    "log-probabilities": SamplingParams(max_tokens=8, temperature=0, logprobs=3, prompt_logprobs=2),
}


def start(model: Path, num_ranks: int, **settings: Any) -> LLM:
    """With room for the tokens of two or three of the prompts' answers: the others are preempted, or wait."""
    return LLM(
        str(model), device="cpu", dtype="float32", tensor_parallel_size=num_ranks, max_num_seqs=8, max_model_len=64,
        num_gpu_blocks_override=10, block_size=8, max_num_batched_tokens=32, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ranks(demo_model: Path) -> Iterator[tuple[LLM, LLM]]:
    """The same model on one rank and on two."""
    one, two = start(demo_model, 1), start(demo_model, 2)
    yield one, two
    one.close()
    two.close()


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_answer_as_one(ranks: tuple[LLM, LLM], kind: str) -> None:
    one, two = (llm.generate(PROMPTS, KINDS[kind], use_tqdm=False) for llm in ranks)
    for expected, got in zip(one, two, strict=True):
        assert [output.token_ids for output in got.outputs] == [output.token_ids for output in expected.outputs]
        for mine, theirs in zip(got.outputs, expected.outputs, strict=True):
            for a, b in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
                assert {i: each.logprob for i, each in a.items()} == pytest.approx(
                    {i: each.logprob for i, each in b.items()}, abs=1e-4
                )


def test_embeddings_of_two_ranks(ranks: tuple[LLM, LLM]) -> None:
    one, two = (llm.embed(PROMPTS, use_tqdm=False) for llm in ranks)
    for expected, got in zip(one, two, strict=True):
        assert got.outputs.embedding == pytest.approx(expected.outputs.embedding, abs=1e-5)


def test_each_rank_holds_its_part_of_the_cache(ranks: tuple[LLM, LLM]) -> None:
    one, two = (llm._engine.runner for llm in ranks)
    assert two.num_blocks == one.num_blocks
    assert two.kv_cache_bytes == one.kv_cache_bytes
    assert two.device_name == "2 x CPU, 1 thread"


def test_a_model_that_cannot_be_divided_is_refused(demo_model: Path) -> None:
    with pytest.raises(ModelError, match=r"\(\d+\) cannot be divided among 3 ranks"):
        start(demo_model, 3)


def test_more_ranks_than_gpus_are_refused(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.models.families import read_spec
    from engine.setup import options
    from engine.worker.device import CudaDevice

    monkeypatch.setattr(options, "find_device", lambda name: CudaDevice(0))
    monkeypatch.setattr(CudaDevice, "memory", lambda self: type("M", (), {"total": 1 << 30})())
    config = EngineConfig(model=str(demo_model), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="the parallel sizes together must be at most 0, the GPUs that PyTorch sees"):
        options.runner_options(config, read_spec(demo_model), offline=True)


class Silent:
    """A follower whose process does nothing."""

    rank, where = 3, "pid 1"

    def __init__(self) -> None:
        self.connection, self.theirs = Pipe()
        self.killed = False

    def end(self, kill: bool) -> None:
        self.killed = kill


def test_a_rank_without_signs_of_life_is_named_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: watches[0]._ended.set())
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    reasons: list[str] = []
    watches: list[ranks_module.Watch] = []
    follower = Silent()
    follower.theirs.send_bytes(b"")
    watches.append(ranks_module.Watch([follower], Losses(reasons.append), seconds=0.01))  # type: ignore[list-item]
    watches[0]._thread.join(60)
    assert reasons == ["the process of rank 3 sent no heartbeat for 0 s: pid 1"]
    assert follower.killed


@pytest.mark.parametrize(
    ("sent", "how"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        pytest.param(signal.SIGSTOP, "sent no heartbeat for 7 s", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_named_with_the_requests_that_it_ends(demo_model: Path, sent: signal.Signals, how: str) -> None:
    async def lose() -> None:
        config = EngineConfig(
            model=str(demo_model), device="cpu", tensor_parallel_size=2, max_num_seqs=2, max_model_len=64,
            num_gpu_blocks_override=20, engine_restarts=0,
        )  # fmt: skip
        engine = await AsyncEngine.start(config)
        try:
            params = SamplingParams(max_tokens=60, ignore_eos=True)
            follower = _child_of(engine._replicas[0].pid)
            assert engine.model.tokenizer is not None
            updates = engine.generate(EngineRequest("1", engine.model.tokenizer.encode("Once"), params))
            await anext(updates)
            os.kill(follower, sent)
            with pytest.raises(EngineDeadError, match=how):
                async for _ in updates:
                    pass
            async with asyncio.timeout(240):
                while engine.state.phase != "dead":
                    await engine.state_change(engine.state)
            shown = Readiness(engine).as_dict()
            assert shown["last_loss"] == f"the process of rank 1 {how}"
            assert engine.state.reason.endswith(f": pid {follower}")
            assert not Path(f"/proc/{follower}").exists()
        finally:
            engine.close()

    asyncio.run(lose())


def _child_of(pid: int) -> int:
    """The one process that `pid` has started to follow it."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            if "engine.worker.parallel.follower" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    raise AssertionError("there is no follower")
