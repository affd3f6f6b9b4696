"""Two ranks, or two stages, as they run on two GPUs, without any: all but the hardware. Triton's interpreter runs the
kernels.

All ranks but the first are forks of this process. They map the memory through which their kernels exchange tensors.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.models.decoder import Decoder
from engine.worker.model_runner import ModelRunner
from engine.worker.parallel import connections, gpu_communicator, ranks
from engine.worker.parallel.gpu_communicator import LARGE_BYTES, SMALL_BYTES
from engine.worker.startup import Membership
from engine.worker.step_sampling import StepSampling

pytest.importorskip("triton")

from kernels.triton import collectives
from kernels.triton.collectives import WORDS, all_reduce
from tests.support.interpreted_gpu import REQUESTS, InterpretedGPU, answers, interpret
from tests.support.quick_interpreter import yield_while_waiting
from tests.support.unwritten import unwritten_is_nan

SIZE, MOST = 2, 4  # ranks of a stage, and of both stages
MANY_TOKENS = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 40}
SOME = ("greedy", "long prompt", "special", "word", "word, scored")  # requests


class SharedMemory:
    """`PeerMemory`, of tensors that forks share."""

    memory: tuple[Tensor, ...] = ()  # of each rank

    def __init__(self, device: torch.device, sizes: dict[str, int], ranks: dist.ProcessGroup | None = None) -> None:
        self._ranks = dist.get_process_group_ranks(ranks)
        self._offsets, total = {}, 0
        for name, size in sizes.items():
            self._offsets[name], total = total, total + -(-size // 1024) * 1024
        assert total <= len(self.memory[0])

    def of(self, rank: int, name: str, length: int, dtype: torch.dtype) -> Tensor:
        return self.memory[self._ranks[rank]][self._offsets[name] :][: length * dtype.itemsize].view(dtype)

    def addresses(self, name: str) -> Tensor:
        return torch.tensor([self.of(rank, name, 1, torch.uint8).data_ptr() for rank in range(SIZE)])


def join(build: connections.Build, losses: object = None) -> Membership:
    size = build.shard.size * build.stage.count
    patience = timedelta(minutes=5)  # then the test fails instead of waiting for a rank that is stuck
    dist.init_process_group("gloo", build.rendezvous, patience, size, build.rank)
    return connections.membership(build, build.options)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, forked: None) -> None:
    interpret(monkeypatch)
    yield_while_waiting(monkeypatch)
    monkeypatch.setattr(gpu_communicator, "CHANNEL_BYTES", 0)  # no more than sums need
    memory = tuple(torch.zeros(5 * LARGE_BYTES, dtype=torch.uint8).share_memory_() for _ in range(MOST))
    monkeypatch.setattr(SharedMemory, "memory", memory)
    monkeypatch.setattr(collectives, "PROGRAMS", 8)  # more only take time
    monkeypatch.setattr(gpu_communicator, "PeerMemory", SharedMemory)
    monkeypatch.setattr(gpu_communicator.OverlappedSum, "sizes", {})
    monkeypatch.setattr(gpu_communicator.OverlappedSum, "__init__", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: MOST)
    monkeypatch.setattr(connections, "join", join)


@pytest.mark.heavy
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="ranks are processes of the interpreter")
@pytest.mark.parametrize(
    ("settings", "small_bytes"),
    [({}, SMALL_BYTES), (MANY_TOKENS, 4 * WORDS)],
    ids=["few tokens at once", "prefill graphs, and norms with the sums"],
)
def test_tokens_are_those_of_one_rank(
    shallow_model: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    small_bytes: int,
) -> None:
    names = SOME if settings else tuple(REQUESTS)
    expected = answers(shallow_model, names, **settings)
    request.getfixturevalue("gpus")
    monkeypatch.setattr(gpu_communicator, "SMALL_BYTES", small_bytes)
    sums: list[tuple[Any, ...]] = []  # arguments of sums of larger tensors

    def recorded(*arguments: Any) -> Tensor:
        sums.append(arguments)
        return all_reduce(*arguments)

    monkeypatch.setattr(collectives, "all_reduce", recorded)
    begin = StepSampling.begin
    kinds: set[tuple[bool, bool]] = set()  # of decode graphs' steps: are some filtered? are logits needed besides?

    def begun(self: StepSampling, handle: Any, packed: Any, logits: Any, tokens: Any, is_graph: bool) -> None:
        begin(self, handle, packed, logits, tokens, is_graph)
        plan = self._sampler._plan
        if is_graph:
            kinds.add((plan.filtered, bool(plan.groups or plan.with_logprobs)))

    monkeypatch.setattr(StepSampling, "begin", begun)
    with unwritten_is_nan():
        assert answers(shallow_model, names, tensor_parallel_size=SIZE, **settings) == expected
    prefill = [graph for graph in InterpretedGPU.graphs if isinstance(graph.result, torch.Tensor)]
    decode = [graph for graph in InterpretedGPU.graphs if isinstance(graph.result, tuple)]
    assert all(graph.num_replays for graph in (*decode, *prefill))
    assert bool(prefill) == bool(settings)
    assert settings or kinds == {(False, False), (False, True), (True, False), (True, True)}
    assert any(len(arguments) == 4 for arguments in sums) == (small_bytes < SMALL_BYTES)  # the fourth is the norm


@pytest.mark.heavy
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="stages are processes of the interpreter")
@pytest.mark.parametrize(
    ("settings", "ranks_each"),
    [
        pytest.param({}, 1, id="few tokens at once", marks=pytest.mark.slow),
        pytest.param(MANY_TOKENS, 1, id="many", marks=pytest.mark.slow),
        pytest.param({}, SIZE, id="two ranks each"),
    ],
)
def test_tokens_are_those_of_one_stage(
    tiny_model: Path, request: pytest.FixtureRequest, settings: dict[str, Any], ranks_each: int
) -> None:
    names = SOME[1:] if ranks_each > 1 else tuple(REQUESTS)
    expected = answers(tiny_model, names, **settings)
    request.getfixturevalue("gpus")
    with unwritten_is_nan():
        found = answers(tiny_model, names, pipeline_parallel_size=2, tensor_parallel_size=ranks_each, **settings)
    assert found == expected
    for kind in (tuple, torch.Tensor) if settings else (tuple,):  # of decode, and of prefill
        assert any(graph.num_replays for graph in InterpretedGPU.graphs if isinstance(graph.result, kind))


@pytest.mark.heavy
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="ranks are processes of the interpreter")
def test_a_step_that_fails_on_all_ranks_is_dropped(
    shallow_model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs keep their connections and graphs: all ranks leave the step at the same collective."""
    names, few = list(REQUESTS)[:1], {"max_num_seqs": 1, "max_num_batched_tokens": 8}
    expected = answers(shallow_model, names, **few)
    request.getfixturevalue("gpus")
    launch, layers, count = ModelRunner.launch, Decoder.forward, 0

    def launching(self: ModelRunner, output: Any) -> Any:
        nonlocal count
        count += output.step > 0  # not a dummy run
        return launch(self, output)

    def running(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        hidden = layers(self, *args, **kwargs)
        if count == 1:  # of a prompt, after its collectives
            raise RuntimeError("it comes and goes")
        return hidden

    monkeypatch.setattr(ModelRunner, "launch", launching)
    monkeypatch.setattr(Decoder, "forward", running)
    resets: list[int] = []
    reset = ranks.RankedRunner.reset

    def resetting(self: ranks.RankedRunner) -> None:
        resets.append(count)
        reset(self)

    monkeypatch.setattr(ranks.RankedRunner, "reset", resetting)
    with unwritten_is_nan():
        assert answers(shallow_model, names, tensor_parallel_size=SIZE, **few) == expected
    assert resets[0] == 1
