"""Which steps run in graphs, and what the graphs read then. Graphs themselves are checked on a GPU (tests/gpu)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.batch import ScheduledBatch, SchedulerOutput
from engine.worker.cuda_graphs import PrefillGraphs, PrefillShape
from engine.worker.device import CpuDevice

QUERIES = 16  # in a tile


@dataclass
class Replay:
    work: Callable[[], object]

    def replay(self) -> None:
        self.work()


class Recorder(CpuDevice):
    """A device whose graphs run their work again."""

    def capture(self, work: Callable[[], Any], share_memory_with: object = None) -> tuple[Replay, Any]:
        return Replay(work), work()


@dataclass
class Runner:
    """Remembers what the forward pass would have read."""

    seen: list[tuple[PrefillShape, list[int], list[list[int]]]] = field(default_factory=list)

    def forward(self, packed: Tensor, shape: PrefillShape, tiles: dict[int, Tensor]) -> Tensor:
        self.seen.append((shape, packed.tolist(), tiles[QUERIES].tolist()))
        return torch.zeros(shape.num_tokens, 4)


def make_graphs(runner: Runner, *, decodes: bool = True) -> PrefillGraphs:
    shapes = [PrefillShape.of_size(size, 100, decodes, {QUERIES}) for size in (32, 64)]
    return PrefillGraphs(Recorder(), runner.forward, torch.zeros(40, dtype=torch.int32), shapes, lambda *_: None)


def step(lens: list[int]) -> SchedulerOutput:
    num_decodes = lens.index(max(lens)) if max(lens) > 1 else len(lens)
    batch = ScheduledBatch([str(i) for i in range(len(lens))], lens, sum(lens), num_decodes, [])
    return SchedulerOutput(0, [], batch, {}, [])


@pytest.mark.parametrize(
    ("lens", "size"),
    [
        ([32], 32),
        ([1, 1, 31], 64),
        ([1] * 30 + [20], 64),
        ([8, 8, 8, 8], 32),
        ([65], None),  # more tokens than any
        ([4] * 13, None),  # more tiles than any
    ],
)
def test_a_step_runs_at_the_smallest_shape_that_holds_it(lens: list[int], size: int | None) -> None:
    shape = make_graphs(Runner()).shape_for(step(lens))
    assert (shape and shape.num_tokens) == size


def test_latent_attention_decodes_in_no_graph_of_steps_that_prefill() -> None:
    graphs = make_graphs(Runner(), decodes=False)
    assert graphs.shape_for(step([1, 20])) is None
    assert graphs.shape_for(step([20])) is not None


def test_a_replayed_step_reads_its_tiles_and_padding_that_writes_nothing() -> None:
    runner = Runner()
    graphs = make_graphs(runner)
    shape = graphs.shape_for(step([1, 20, 3]))
    assert shape is not None
    packed = torch.arange(7, dtype=torch.int32)
    assert graphs.fits(packed)
    assert not graphs.fits(torch.zeros(41))
    runner.seen.clear()
    hidden = graphs.run(shape, packed, 1, [1, 20, 3], [9, 50, 3])
    [(used, read, tiles)] = runner.seen
    assert (used.num_tokens, len(hidden)) == (32, 32)
    assert read[:7] == list(range(7))
    last = shape.num_seqs - 1
    assert tiles == [[1, 16], [1, 0], [2, 0]] + [[last, 0]] * (shape.num_tiles[QUERIES] - 3)
