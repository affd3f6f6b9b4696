"""Drafters that read hidden states: while nothing is proposed, they compute many steps' tokens in one pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from engine import SamplingParams
from engine.worker.proposers import model_proposer
from engine.worker.proposers.following import FollowingProposer
from tests.oracles.drafters import make_eagle3, make_mtp_checkpoint
from tests.oracles.families import make_checkpoint
from tests.support.drafters import Drafted

SPLIT = 9  # tokens of a pass
INTERVAL = 7  # steps between proposals
PARAMS = SamplingParams(max_tokens=26, temperature=0, ignore_eos=True, detokenize=False)


def _mtp(folder: Path) -> tuple[Any, tuple[Path, str]]:
    return make_mtp_checkpoint("glm4_moe", folder), (folder, "mtp")


def _sparse_mtp(folder: Path) -> tuple[Any, tuple[Path, str]]:
    return make_mtp_checkpoint("deepseek_v32", folder), (folder, "mtp")


def _eagle3(folder: Path) -> tuple[Any, tuple[Path, str, Path]]:
    reference = make_eagle3(folder / "head", make_checkpoint("qwen3", folder), vocab=90)
    return reference, (folder, "eagle3", folder / "head")


@pytest.mark.parametrize("make", [_mtp, _sparse_mtp, _eagle3])
@pytest.mark.parametrize("settings", [{}, {"num_gpu_blocks_override": 13}], ids=["", "preempted"])
def test_drafts_after_a_pause_are_those_of_the_reference(
    make: Callable[[Path], tuple[Any, tuple[Any, ...]]],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_proposer, "SPLIT_TOKENS", SPLIT)
    reference, given = make(tmp_path)
    drafted = Drafted(*given, enable_prefix_caching=False, max_model_len=96, **settings)
    steps, passes = 0, list[int]()

    def num_proposals(num_seqs: int) -> int:
        nonlocal steps
        steps += 1
        return 3 if steps % INTERVAL == 0 else 0

    split_pass = FollowingProposer.split_pass

    def recorded(self: FollowingProposer, ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        passes.append(len(ids))
        return split_pass(self, ids, *others)

    monkeypatch.setattr(drafted.policy, "num_proposals", num_proposals)
    expected = drafted.answers(PARAMS, drafts=False)
    monkeypatch.setattr(FollowingProposer, "split_pass", recorded)
    assert drafted.answers(PARAMS) == expected
    assert len(drafted.proposed) > 10
    for known, proposed in drafted.proposed:
        assert proposed == reference.propose(known, 3)[: len(proposed)], "fewer where blocks are missing"
    assert max(passes) <= SPLIT
    assert len(passes) < 0.7 * steps, "most steps are computed later, together"
    if settings:
        assert drafted.llm._engine.scheduler.stats().num_preemptions > 0
    drafted.llm.close()
