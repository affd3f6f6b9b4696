"""From logits to the step's tokens and log-probabilities. Knows rows and their parameters; never knows text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import kernels
from engine.core.batch import SchedulerOutput, TokenLogprobs
from engine.worker.input_batch import InputBatch, PackedStep, Row
from kernels.step import StepTensors


def sample(logits: Tensor, step: StepTensors) -> Tensor:
    """One token for each of the logits' rows [B, V] -> [B] int64, by each row's own parameters and seed."""
    n = len(logits)
    return kernels.sample(
        logits,
        step.temperature[:n],
        step.top_k[:n],
        step.top_p[:n],
        step.min_p[:n],
        step.seed[:n],
        step.next_position[:n],
    )


@dataclass(slots=True)
class LogprobsRequest:
    """Log-probabilities on their way from the device: rows of `scheduled`, and tensors as `kernels.token_logprobs` gives."""

    indices: list[int]
    num_top: list[int]
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]

    @classmethod
    def make(
        cls, output: SchedulerOutput, packed: PackedStep, logits: Tensor, tokens: Tensor
    ) -> LogprobsRequest | None:
        """For the sequences that sample in this step and asked for log-probabilities; None when there are none."""
        indices, num_top = [], []
        for i, row in enumerate(packed.rows):
            if row.sampling.logprobs is not None and output.scheduled[i].samples:
                indices.append(i)
                num_top.append(row.sampling.logprobs)
        if not indices:
            return None
        at = torch.tensor(indices, device=logits.device)
        tensors = kernels.token_logprobs(logits[at], tokens[at], max(num_top))
        return cls(indices, num_top, _to_cpu(tensors))

    def read(self) -> dict[int, TokenLogprobs]:
        """After the device is done: index in `scheduled` -> its log-probabilities."""
        return dict(zip(self.indices, _records(self.tensors, self.num_top), strict=True))


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens on their way: index in `scheduled`, how many most likely ones, the tensors."""

    batch: InputBatch
    parts: list[tuple[int, int, tuple[Tensor, Tensor, Tensor, Tensor]]] = field(default_factory=list)

    @staticmethod
    def shares(output: SchedulerOutput, batch: InputBatch) -> list[int]:
        """The shares of the step after whose tokens a prompt token follows that is to be scored."""
        if not batch.num_scored:
            return []
        return [
            i
            for i, share in enumerate(output.scheduled)
            if (row := batch.rows[share.request_id]).sampling.prompt_logprobs is not None
            and share.start + 1 < row.num_prompt_tokens
        ]

    def add(
        self, index: int, start: int, row: Row, hidden: Tensor, to_logits: Callable[[Tensor], Tensor], num_rows: int
    ) -> None:
        """hidden [T, hidden]: of the tokens from `start` on that a share computes. Takes memory for `num_rows` logits."""
        num_top = row.sampling.prompt_logprobs
        assert num_top is not None
        following = row.token_ids[start + 1 : min(start + 1 + len(hidden), row.num_prompt_tokens)]
        tokens = self.batch.to_device(torch.from_numpy(following)).long()
        for at in range(0, len(tokens), num_rows):
            part = tokens[at : at + num_rows]
            found = kernels.token_logprobs(to_logits(hidden[at : at + len(part)]), part, num_top)
            self.parts.append((index, num_top, _to_cpu(found)))

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """After the device is done: index in `scheduled` -> log-probabilities of the tokens that follow its own."""
        found: dict[int, list[TokenLogprobs]] = {}
        for index, num_top, tensors in self.parts:
            found.setdefault(index, []).extend(_records(tensors, [num_top] * len(tensors[0])))
        return found


def _to_cpu(tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nothing waits: they are there when the device is done."""
    return tuple(t.to("cpu", non_blocking=True) for t in tensors)  # type: ignore[return-value]


def _records(tensors: tuple[Tensor, Tensor, Tensor, Tensor], num_top: list[int]) -> list[TokenLogprobs]:
    logprobs, ranks, top_ids, top_logprobs = (t.tolist() for t in tensors)
    return [
        TokenLogprobs(logprobs[i], ranks[i], top_ids[i][:top], top_logprobs[i][:top]) for i, top in enumerate(num_top)
    ]
