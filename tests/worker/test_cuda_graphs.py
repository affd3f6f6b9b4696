"""Choice of the steps that run in graphs, and the inputs of the graphs. Graphs themselves are checked on a GPU
(tests/gpu).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.batch import ScheduledBatch, SchedulerOutput
from engine.models.families import read_spec
from engine.models.shard import WHOLE
from engine.worker.attention.group_attention import CapturedPrefills
from engine.worker.cuda_graphs import PrefillGraphs, PrefillShape
from engine.worker.device import CpuDevice
from engine.worker.executor import Padding, StepRequest
from engine.worker.forward_pass import StepSize
from engine.worker.input_batch import Members, PackedStep
from engine.worker.options import RunnerOptions
from engine.worker.startup import build_runner

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
class Forward:
    """Remembers what the forward pass would have read."""

    model = SimpleNamespace(stage=WHOLE)
    seen: list[tuple[StepSize, list[int], list[list[int]]]] = field(default_factory=list)

    def run(self, packed: Tensor, size: StepSize, prefills: CapturedPrefills) -> Tensor:
        self.seen.append((size, packed.tolist(), prefills.tiles(QUERIES).tolist()))
        return torch.zeros(size.num_tokens, 4)

    def last_tokens(self, step: StepRequest, packed: PackedStep) -> None:
        return None


def make_graphs(forward: Forward, *, decodes: bool = True) -> PrefillGraphs:
    shapes = [PrefillShape.of_size(size, 100, decodes, {QUERIES}) for size in (32, 64)]
    buffer = torch.zeros(40, dtype=torch.int32)
    return PrefillGraphs(Recorder(), forward, buffer, shapes, lambda *_: None)  # type: ignore[arg-type]


def step(lens: list[int]) -> StepRequest:
    num_decodes = lens.index(max(lens)) if max(lens) > 1 else len(lens)
    batch = ScheduledBatch([str(i) for i in range(len(lens))], lens, sum(lens), num_decodes, [])
    return StepRequest(SchedulerOutput(0, [], batch, {}, []))


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
    padding = make_graphs(Forward()).fits(step(lens))
    assert (padding and padding.num_tokens) == size


def test_steps_that_do_not_prefill_or_count_experts_run_elsewhere() -> None:
    graphs = make_graphs(Forward())
    assert graphs.fits(step([1, 1])) is None
    assert graphs.fits(step([1, 20])._replace(counts_experts=True)) is None
    assert graphs.fits(step([1, 20])._replace(scored=[1])) is not None


def test_a_step_that_appends_more_blocks_than_the_graphs_buffer_holds_runs_eagerly(tiny_model: Path) -> None:
    options = {"device": CpuDevice(), "dtype": torch.float32, "kv_dtype": torch.float32, "max_model_len": 64}
    spec = read_spec(tiny_model)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 16, "enforce_eager": True}
    runner = build_runner(tiny_model, spec, RunnerOptions(**options, **limits))  # type: ignore[arg-type]
    graphs = make_graphs(Forward())
    runner.executors = [graphs]
    small, large = step([20]), step([20])
    for each, num_blocks in ((small, 1), (large, 30)):
        each.output.new_block_ids["0"] = [[0] * num_blocks]
    padding = graphs.fits(small)
    assert padding is not None
    length = runner.batch.packed_size(small.output, *padding)
    graphs._buffer = torch.zeros(length, dtype=torch.int32)
    assert runner._executor(small) == (graphs, padding)
    assert runner._executor(large) == (runner._eager, Padding())


def test_latent_attention_decodes_in_no_graph_of_steps_that_prefill() -> None:
    graphs = make_graphs(Forward(), decodes=False)
    assert graphs.fits(step([1, 20])) is None
    assert graphs.fits(step([20])) is not None


def test_a_replayed_step_reads_its_tiles_and_padding_that_writes_nothing() -> None:
    forward, lens = Forward(), [1, 20, 3]
    graphs = make_graphs(forward)
    padding = graphs.fits(step(lens))
    assert padding is not None
    assert graphs.max_words == 40
    words = torch.arange(7, dtype=torch.int32)
    members = Members(ScheduledBatch([], [], 0, 0, []), {})
    lengths = np.array([9, 50, 3])
    packed = PackedStep(words, 0, padding.num_seqs, padding.num_tokens, 1, members, lengths, lengths)
    forward.seen.clear()
    hidden = graphs.run(step(lens), packed).hidden
    [(used, read, tiles)] = forward.seen
    assert hidden is not None
    assert (used.num_tokens, len(hidden)) == (32, 24)
    assert read[:7] == list(range(7))
    last = padding.num_seqs - 1
    assert tiles[:3] == [[1, 16], [1, 0], [2, 0]]
    assert tiles[3:] == [[last, 0]] * (len(tiles) - 3)
