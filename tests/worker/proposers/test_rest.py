"""A drafter that rests does nothing, and afterwards it guesses for the requests whose tokens it has all seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from engine import SamplingParams
from engine.core.batch import SchedulerOutput
from engine.core.request import Request
from engine.worker.proposers.model_proposer import ModelProposer
from tests.oracles.block_drafters import make_block_drafter
from tests.oracles.drafters import make_eagle3, make_mtp_checkpoint
from tests.oracles.families import make_checkpoint
from tests.support.drafters import Drafted

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
PROMPTS = [[7 * i + j for j in range(4 + 2 * i)] for i in range(12)]
REST = range(9, 20)  # steps
Made = tuple[Callable[[list[int], int], list[int]], tuple[Any, ...]]


def _draft_model(folder: Path) -> Made:
    make_checkpoint("qwen3", folder)
    alone = Drafted(folder, "draft_model", folder)

    def guesses(known: list[int], num: int) -> list[int]:
        [found] = alone.answers(PARAMS.clone(max_tokens=num), drafts=False, prompts=[known])
        return found

    return guesses, (folder, "draft_model", folder)


def _mtp(folder: Path) -> Made:
    return make_mtp_checkpoint("glm4_moe", folder).propose, (folder, "mtp")


def _eagle3(folder: Path) -> Made:
    reference = make_eagle3(folder / "head", make_checkpoint("qwen3", folder), vocab=90)
    return reference.propose, (folder, "eagle3", folder / "head")


def _dflash(folder: Path) -> Made:
    reference = make_block_drafter("dflash", folder / "block", make_checkpoint("qwen3", folder))
    return reference.propose, (folder, "dflash", folder / "block")


@pytest.mark.parametrize("make", [_draft_model, _mtp, _eagle3, _dflash])
def test_a_drafter_rests_and_drafts_again_for_new_requests(
    make: Callable[[Path], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guesses, given = make(tmp_path)
    drafted = Drafted(*given, enable_prefix_caching=False)
    policy, runner = drafted.policy, drafted.llm._engine.runner
    launch, offer = runner.launch, policy.offer
    steps, calls = list[bool](), [0]  # whether the drafter rested, and how often it ran
    unknown, offered = set[str](), list[tuple[str, bool, list[int], list[int]]]()

    def launched(output: SchedulerOutput) -> Any:
        before = calls[0]
        handle = launch(output)
        steps.append(output.drafter_rests)
        assert calls[0] == before + (not output.drafter_rests), "it runs unless it rests"
        if output.drafter_rests:
            unknown.update(output.batch.request_ids)
        return handle

    def offers(request: Request, tokens: list[int]) -> None:
        offered.append((request.request_id, len(steps) > REST.stop, list(request.token_ids), tokens))
        if request.request_id in unknown:
            assert tokens == [], "it has not seen some of the tokens"
        offer(request, tokens)

    propose = type(runner.proposer).propose  # type: ignore[attr-defined]

    def counted(self: ModelProposer, step: Any) -> Any:
        calls[0] += 1
        return propose(self, step)

    monkeypatch.setattr(type(runner.proposer), "propose", counted)  # type: ignore[attr-defined]
    expected = drafted.answers(PARAMS, drafts=False, prompts=PROMPTS)
    monkeypatch.setattr(runner, "launch", launched)
    monkeypatch.setattr(policy, "offer", offers)
    monkeypatch.setattr(policy, "drafter_rests", lambda begins: len(steps) in REST)
    assert drafted.answers(PARAMS, prompts=PROMPTS) == expected
    assert sum(steps) == len(REST)
    after = [(known, tokens) for name, is_late, known, tokens in offered if is_late and name not in unknown]
    assert len(after) > 8
    assert sum(bool(tokens) for _, tokens in after) > len(after) / 2
    for known, tokens in after[::5]:
        assert tokens == guesses(known, 3)[: len(tokens)]
    assert any(name in unknown for name, is_late, *_ in offered if is_late), "which was offered nothing"
    drafted.llm.close()
