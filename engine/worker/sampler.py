"""From logits to the step's tokens and log-probabilities. Knows rows and their parameters; never knows text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import kernels
from engine.core.batch import PromptScores, SchedulerOutput, TokenLogprobs
from engine.worker.input_batch import InputBatch, PackedStep, Row
from kernels.layout import StepTensors


def sample(
    logits: Tensor,
    step: StepTensors,
    part: kernels.Part,
    mask_of: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One token for each of the logits' rows [B, V] -> [B] int64, by each row's own parameters and seed; see `kernels.sample`."""
    n = len(logits)
    return kernels.sample(
        logits,
        step.temperature[:n],
        step.top_k[:n],
        step.top_p[:n],
        step.min_p[:n],
        step.seed[:n],
        step.next_position[:n],
        part,
        mask_of,
        out,
    )


@dataclass(slots=True)
class LogprobsRequest:
    """Log-probabilities on their way from the device: shares of the step, and tensors as `kernels.token_logprobs` gives."""

    indices: list[int]
    num_top: list[int]
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]

    @classmethod
    def make(cls, packed: PackedStep, logits: Tensor, tokens: Tensor) -> LogprobsRequest | None:
        """For the sequences that sample in this step and asked for log-probabilities; None when there are none."""
        members = packed.members
        indices = [i for i in members.with_logprobs if i not in members.batch.partial]
        if not indices:
            return None
        num_top = [members.rows[i].sampling.logprobs or 0 for i in indices]
        at = torch.tensor(indices, device=logits.device)
        tensors = kernels.token_logprobs(logits[at], tokens[at], max(num_top))
        return cls(indices, num_top, _to_cpu(tensors))

    def read(self) -> dict[int, TokenLogprobs]:
        """After the device is done: share -> its log-probabilities."""
        return dict(zip(self.indices, _records(self.tensors, self.num_top), strict=True))


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens on their way: share, first token, how many most likely ones, the tensors."""

    batch: InputBatch
    parts: list[tuple[int, int, int, tuple[Tensor, Tensor, Tensor, Tensor]]] = field(default_factory=list)

    @staticmethod
    def shares(output: SchedulerOutput, batch: InputBatch) -> list[int]:
        """The shares of the step after whose tokens a prompt token follows that is to be scored; before `pack`."""
        if not batch.num_scored:
            return []
        return [
            i
            for i, request_id in enumerate(output.batch.request_ids)
            if (row := batch.rows[request_id]).sampling.prompt_logprobs is not None
            and batch.num_computed(row) + 1 < row.num_prompt_tokens
        ]

    def add(
        self, index: int, end: int, row: Row, hidden: Tensor, to_logits: Callable[[Tensor], Tensor], num_rows: int
    ) -> None:
        """hidden [T, hidden]: of the tokens before `end` that a share computes. Takes memory for `num_rows` logits."""
        num_top, first = row.sampling.prompt_logprobs, end - len(hidden) + 1
        assert num_top is not None
        following = row.token_ids[first : min(end + 1, row.num_prompt_tokens)]
        tokens = self.batch.to_device(torch.from_numpy(following)).long()
        for at in range(0, len(tokens), num_rows):
            part = tokens[at : at + num_rows]
            found = kernels.token_logprobs(to_logits(hidden[at : at + len(part)]), part, num_top)
            self.parts.append((index, first, num_top, _to_cpu(found)))

    def read(self) -> dict[int, PromptScores]:
        """After the device is done: share -> log-probabilities of the tokens that follow its own."""
        found: dict[int, PromptScores] = {}
        for index, first, num_top, tensors in self.parts:
            records = _records(tensors, [num_top] * len(tensors[0]))
            found.setdefault(index, PromptScores(first, [])).logprobs.extend(records)
        return found


def _to_cpu(tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nothing waits: they are there when the device is done."""
    return tuple(t.to("cpu", non_blocking=True) for t in tensors)  # type: ignore[return-value]


def _records(tensors: tuple[Tensor, Tensor, Tensor, Tensor], num_top: list[int]) -> list[TokenLogprobs]:
    logprobs, ranks, top_ids, top_logprobs = (t.tolist() for t in tensors)
    return [
        TokenLogprobs(logprobs[i], ranks[i], top_ids[i][:top], top_logprobs[i][:top]) for i, top in enumerate(num_top)
    ]
