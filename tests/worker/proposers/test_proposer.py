"""A drafter on the device: what it gets after each step, and that its proposals become drafts."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from engine import LLM, SamplingParams
from engine.core.drafts.policy import DraftPolicy
from engine.worker.model_runner import ModelRunner
from engine.worker.proposers.draft_graphs import DraftWork
from engine.worker.proposers.proposer import SampledStep

PROMPTS = [[5, 9, 77, 5, 9], [30, 31, 32], [200, 7, 7, 7], [4] * 20, list(range(40, 60))]
NUM_DRAFTS = 3


class Teller:
    """Proposes the tokens of known answers, some of them wrong, and checks what it gets."""

    layers = (0, 1)
    probabilities = None

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._rng = runner, Random(1)
        self.answers: dict[tuple[int, ...], list[int]] = {}  # by prompt
        self.num_long = 0

    def allocate(self, num_blocks: int) -> None:
        pass

    def release(self) -> None:
        pass

    def works(self) -> list[DraftWork]:
        return []

    def capture(self) -> None:
        pass

    def propose(self, step: SampledStep) -> Tensor:
        assert step.hidden is not None
        samples, positions = step.samples, step.step.samples.next_position
        token_index = samples.token_index if samples.has_drafts else step.step.samples.token_index.tolist()
        logits = self._runner.model.logits(step.hidden.last[token_index[: len(samples)]])
        wanted = [i for i in range(len(samples)) if i not in samples.unwanted]
        assert logits.argmax(-1)[wanted].tolist() == step.tokens[wanted].tolist(), "hidden states of other tokens"
        num_tokens = step.packed.members.batch.total_num_tokens
        for layer in self.layers:  # the last of which is the model's last
            assert step.hidden.layers[layer][:num_tokens].abs().sum(1).min() > 0
        assert torch.equal(step.hidden.layers[1][:num_tokens], step.hidden.last[:num_tokens])
        found = torch.full((samples.num_requests, step.num_proposals), -1)
        for i, (row, count) in enumerate(zip(step.packed.members.rows, step.counts.tolist(), strict=True)):
            if not count:
                continue
            self.num_long += count > 1
            prompt = tuple(row.token_ids.tolist()[: row.num_prompt_tokens])
            newest = int(positions[samples.of_request(i)[count - 1]]) - len(prompt)
            answer = self.answers[prompt]
            assert answer[newest] == step.tokens[samples.of_request(i)[count - 1]]
            ahead = answer[newest + 1 : newest + 1 + step.num_proposals]
            ahead = [each if self._rng.random() < 0.8 else 3 for each in ahead]
            found[i, : len(ahead)] = torch.tensor(ahead, dtype=torch.int64)
        assert step.num_blocks.shape == (1, samples.num_requests)
        return found


@pytest.mark.parametrize("eager", [True, False], ids=["kernel by kernel", "captured"])
def test_a_drafter_gets_hidden_states_and_its_proposals_become_drafts(tiny_model: Path, eager: bool) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    found: list[list[list[int]]] = []
    for by_model in (False, True):
        llm = LLM(
            str(tiny_model), device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, block_size=8,
            max_num_batched_tokens=16, debug_checks=True, enforce_eager=eager, enable_prefix_caching=False,
            speculative_config={"num_speculative_tokens": NUM_DRAFTS, "enable_adaptive_verification": False},
        )  # fmt: skip
        scheduler, runner = llm._engine.scheduler, llm._engine.runner
        assert isinstance(runner, ModelRunner)
        policy, teller = scheduler._planner.drafts, Teller(runner)
        assert isinstance(policy, DraftPolicy)
        if by_model:
            teller.answers = {tuple(ids): tokens for ids, tokens in zip(PROMPTS, found[0], strict=True)}
            runner.use_proposer(teller)
            policy._num_by_model, policy.has_drafter = NUM_DRAFTS, True
        else:
            scheduler._planner.drafts = scheduler._steps._drafts = None
        found.append([list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)])
        llm.close()
    assert found[0] == found[1]
    assert policy is not None
    assert policy.counts.num_accepted_tokens > 50
    assert teller.num_long > 20
