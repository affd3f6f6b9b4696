"""Two ranks, or two stages, as they run on two GPUs, without any: all but the hardware. Triton's interpreter runs the
kernels.

All ranks but the first are forks of this process. They map the memory through which their kernels exchange tensors.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.worker.parallel import gpu_communicator, ranks
from engine.worker.parallel.gpu_communicator import LARGE_BYTES, SMALL_BYTES
from engine.worker.parallel.launcher import Follower, Location, Lost
from engine.worker.startup import Membership
from engine.worker.step_sampling import StepSampling

pytest.importorskip("triton")

from kernels.triton import collectives
from kernels.triton.collectives import WORDS, all_reduce
from tests.support.forks import hide_garbage_from_forks
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


class Fork:
    """A follower in a fork of this process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection, theirs = Pipe()
        # From Python 3.12 on, it warns about threads.
        with hide_garbage_from_forks(), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self._pid = os.fork()
            if self._pid == 0:
                self._follow(theirs)
        self.where = f"pid {self._pid}"
        theirs.close()

    def _follow(self, connection: Connection) -> None:
        code = 1
        try:
            ranks.follow(connection)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def send(self, data: bytes) -> None:
        self.connection.send_bytes(data)

    def expect_end(self) -> None:
        pass

    def end(self, kill: bool) -> None:
        if kill:
            os.kill(self._pid, 9)
        assert os.waitpid(self._pid, 0)[1] == 0 or kill
        self.connection.close()


class ForkLauncher:
    folder: Path  # for the ranks to meet

    def __init__(self, num_ranks: int) -> None:
        self.locations = [Location("", rank) for rank in range(num_ranks)]

    def start(self, lost: Lost) -> Sequence[Follower]:
        return [Fork(location.device_index) for location in self.locations[1:]]

    def rendezvous(self) -> str:
        return f"file://{self.folder}/store"

    def close(self) -> None:
        pass


def join(build: ranks.Build) -> Membership:
    size = build.shard.size * build.stage.count
    patience = timedelta(minutes=5)  # then the test fails instead of waiting for a rank that is stuck
    dist.init_process_group("gloo", build.rendezvous, patience, size, build.rank)
    return ranks.membership(build, build.options)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interpret(monkeypatch)
    yield_while_waiting(monkeypatch)
    monkeypatch.setattr(gpu_communicator, "CHANNEL_BYTES", 0)  # no more than sums need
    memory = tuple(torch.zeros(5 * LARGE_BYTES, dtype=torch.uint8).share_memory_() for _ in range(MOST))
    monkeypatch.setattr(SharedMemory, "memory", memory)
    monkeypatch.setattr(collectives, "PROGRAMS", 8)  # more only take time
    monkeypatch.setattr(gpu_communicator, "PeerMemory", SharedMemory)
    monkeypatch.setattr(gpu_communicator.OverlappedSum, "sizes", {})
    monkeypatch.setattr(gpu_communicator.OverlappedSum, "__init__", lambda *_: None)
    monkeypatch.setattr(ForkLauncher, "folder", tmp_path, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: MOST)
    monkeypatch.setattr(ranks, "LocalLauncher", ForkLauncher)
    monkeypatch.setattr(ranks, "MAX_MISSED", 300)  # an interpreter that computes lets its heartbeats wait
    monkeypatch.setattr(ranks, "join", join)


@pytest.mark.heavy
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="ranks are processes of the interpreter")
@pytest.mark.parametrize(
    ("settings", "small_bytes"),
    [({}, SMALL_BYTES), (MANY_TOKENS, 4 * WORDS)],
    ids=["few tokens at once", "prefill graphs, and norms with the sums"],
)
def test_tokens_are_those_of_one_rank(
    tiny_model: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    small_bytes: int,
) -> None:
    names = SOME if settings else tuple(REQUESTS)
    expected = answers(tiny_model, names, **settings)
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
        assert answers(tiny_model, names, tensor_parallel_size=SIZE, **settings) == expected
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
    names = SOME if ranks_each > 1 else tuple(REQUESTS)
    expected = answers(tiny_model, names, **settings)
    request.getfixturevalue("gpus")
    with unwritten_is_nan():
        found = answers(tiny_model, names, pipeline_parallel_size=2, tensor_parallel_size=ranks_each, **settings)
    assert found == expected
    for kind in (tuple, torch.Tensor) if settings else (tuple,):  # of decode, and of prefill
        assert any(graph.num_replays for graph in InterpretedGPU.graphs if isinstance(graph.result, kind))
