"""From logits to the step's tokens and log-probabilities. Knows rows and their parameters; never knows text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from engine.core.batch import SchedulerOutput, TokenLogprobs
from engine.worker.input_batch import PackedStep
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
        return cls(indices, num_top, tuple(t.to("cpu", non_blocking=True) for t in tensors))  # type: ignore[arg-type]

    def read(self) -> dict[int, TokenLogprobs]:
        """After the device is done: index in `scheduled` -> its log-probabilities."""
        logprobs, ranks, top_ids, top_logprobs = (t.tolist() for t in self.tensors)
        return {
            index: TokenLogprobs(
                logprobs[i], ranks[i], top_ids[i][: self.num_top[i]], top_logprobs[i][: self.num_top[i]]
            )
            for i, index in enumerate(self.indices)
        }
