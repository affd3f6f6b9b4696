"""A launched step: sampled once its grammar masks are there, then read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from engine.core.batch import SchedulerOutput, StepResult
from engine.worker.device import Event, Stopwatch
from engine.worker.expert_load import ExpertCounts
from engine.worker.pooler import Embeddings
from engine.worker.sampling.logprobs import PromptLogprobs, SampledLogprobs
from engine.worker.sampling.verification import Verification


@dataclass(slots=True)
class StepHandle:
    """A launched step. Call `read` once, after `sample` if there are `guided` requests."""

    output: SchedulerOutput
    num_sampled: list[int] = field(default_factory=list)  # tokens sampled for each request
    unsampled: list[int] = field(default_factory=list)  # indices of requests without a token, in descending order
    # Indices of requests that wait for grammar masks before they are sampled.
    guided: list[int] = field(default_factory=list)
    verification: Verification | None = None  # of drafts; None: the step has none
    # [len(guided), words], filled by the caller.
    masks: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.int32))
    device_waited: bool = False  # the previous step had guided requests and finished before this one was launched
    wait_seconds: float = 0.0  # time that `read` waited for the device
    prompt_logprobs: PromptLogprobs | None = None
    expert_counts: ExpertCounts | None = None
    encoding: Stopwatch | None = None  # measured the encoder of images; None: it did not run on this rank
    embeddings: Embeddings | None = None
    logprobs: SampledLogprobs | None = None
    tokens: Tensor | None = None  # [B] int64 on the CPU, valid after `done`
    proposals: Tensor | None = None  # [n, k] int64 on the CPU, valid after `done`: by a drafter, -1: no token
    done: Event | None = None
    finish: Callable[[Sequence[int]], None] | None = None  # the work of `sample`; keeps the step's logits alive

    @property
    def has_ended(self) -> bool:
        """Return whether the step has run: on a CPU, once it is sampled."""
        return self.done is None and self.tokens is not None

    def sample(self, deferred: Sequence[int] = ()) -> None:
        """Sample the `guided` requests, before the next step is launched.

        Before this call, the caller reads the previous step and fills `masks`, [len(guided), (vocabulary + 31) // 32]
        int32: one bit for each token, the lowest bit first, set if the token is allowed. The `deferred` indices, whose
        masks are not filled, get no token: their requests compute their newest token again in the next step.
        """
        assert self.finish is not None
        self.finish(deferred)
        self.finish = None

    def read(self) -> tuple[SchedulerOutput, StepResult]:
        assert self.tokens is not None, "guided requests are sampled first"
        if self.done is not None:
            start = time.perf_counter()
            self.done.synchronize()
            self.wait_seconds = time.perf_counter() - start
        token_ids, num_sampled = self.tokens.tolist(), self.num_sampled
        if self.verification is not None:
            token_ids, num_sampled = self.verification.kept(token_ids, self.unsampled)
        else:
            for index in self.unsampled:
                del token_ids[index]
        result = StepResult(token_ids, num_sampled)
        if self.proposals is not None:
            for index, tokens in enumerate(self.proposals.tolist()):
                if num_sampled[index]:
                    result.proposals[index] = tokens[: tokens.index(-1)] if -1 in tokens else tokens
        if self.logprobs is not None:
            for index, records in self.logprobs.read().items():
                result.logprobs[index] = records[: num_sampled[index]]
        if self.prompt_logprobs is not None:
            result.prompt_logprobs.update(self.prompt_logprobs.read())
        if self.embeddings is not None:
            result.embeddings.update(self.embeddings.read())
        if self.expert_counts is not None:
            result.expert_tokens.update(self.expert_counts.read())
        if self.encoding is not None:
            result = replace(result, encoder_seconds=self.encoding.seconds())
        return self.output, result
