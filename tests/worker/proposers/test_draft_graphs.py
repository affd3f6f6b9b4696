"""Captured passes of drafters, with the captured work done again in place of graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from engine import SamplingParams
from engine.worker.device import CpuDevice
from engine.worker.model_runner import ModelRunner
from engine.worker.proposers import model_proposer
from engine.worker.proposers.draft_graphs import run_all
from tests.oracles.drafters import make_mtp_checkpoint
from tests.support.drafters import Drafted
from tests.support.interpreted_gpu import Replayed

PARAMS = [
    SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, detokenize=False),
    SamplingParams(max_tokens=14, temperature=0.9, top_k=30, seed=3, ignore_eos=True, detokenize=False),
]


@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_drafts_are_those_of_passes_that_are_not_captured(
    method: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Replayed] = []

    def capture(device: CpuDevice, work: object, share: object = None) -> tuple[Replayed, object]:
        assert callable(work)
        graphs.append(Replayed(work, work()))
        return graphs[-1], graphs[-1].result

    monkeypatch.setattr(CpuDevice, "capture", capture)
    monkeypatch.setattr(model_proposer, "CAPTURES", True)
    if method == "mtp":
        make_mtp_checkpoint("glm4_moe", tmp_path)
    drafted = Drafted(*((tmp_path, method) if method == "mtp" else (tiny_model, method, tiny_model)))
    runner = drafted.llm._engine.runner
    assert isinstance(runner, ModelRunner)
    assert runner.proposer is not None
    found = [_run(drafted, params) for params in PARAMS]
    works = runner.proposer.works()
    run_all(works, runner.device, runner.options.dtype)  # as while kernels are compiled: it changes no guess
    assert [_run(drafted, params) for params in PARAMS] == found
    runner.proposer.capture()
    assert len(graphs) == sum(len(work.sizes) for work in works) > 4
    num_captured = sum(graph.num_replays for graph in graphs)
    assert [_run(drafted, params) for params in PARAMS] == found
    assert sum(graph.num_replays for graph in graphs) - num_captured > 10
    drafted.llm.close()


def _run(drafted: Drafted, params: SamplingParams) -> tuple[list[list[int]], list[tuple[list[int], list[int]]]]:
    """Return the answers, and what was proposed on the way."""
    drafted.llm.reset_prefix_cache()
    drafted.proposed = []
    return drafted.answers(params), drafted.proposed
