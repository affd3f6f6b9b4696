"""Captured steps of few decoding sequences on a CPU: a replay takes one call, without Python for each operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import kernels
from engine.worker.decode_step import DecodeStep
from engine.worker.executor import Computed, Padding, StepRequest, WholeLogits
from engine.worker.input_batch import PackedStep
from engine.worker.parallel.step_threads import StepThreads
from engine.worker.sampling.sampler import Sampler

MAX_TOKENS = 16  # with more, the operations themselves take longer than Python


class CapturedSteps:
    """Captures the logits of a decode step, with or without drafts, for each size at its first use. A size is the
    number of sequences and of tokens.

    Owns the buffer from which steps read their packed input. A model is not captured if PyTorch computes a part of it.
    With a captured model, PyTorch computes only sampling and gets one thread: more would spin beside the kernels'.
    """

    def __init__(self, work: DecodeStep, sampler: Sampler, buffer: Tensor) -> None:
        self._work, self._sampler, self._buffer = work, sampler, buffer
        self._captured: dict[tuple[int, int], tuple[Tensor, Callable[[], None] | None]] = {}
        self._threads: dict[tuple[int, int], StepThreads] = {}  # for steps that are not captured

    @property
    def max_words(self) -> int:
        return len(self._buffer)

    def fits(self, step: StepRequest) -> Padding | None:
        is_plain = step.samples_every_token and not step.needs_every_token and not step.has_adapters
        fits = is_plain and step.batch.total_num_tokens <= MAX_TOKENS
        return Padding() if fits else None

    def run(self, step: StepRequest, packed: PackedStep) -> Computed:
        """Compute the logits of a step. The next step of this size overwrites them."""
        self._buffer[: len(packed.packed)] = packed.packed
        size = packed.num_seqs, packed.num_tokens
        return Computed(logits=WholeLogits(self._logits(size), self._sampler))

    def _logits(self, size: tuple[int, int]) -> Tensor:
        work = partial(self._work.logits, self._buffer, *size)
        if (captured := self._captured.get(size)) is not None:
            logits, replay = captured
            if replay is None:
                return self._threads[size].run(work)
            replay()
            return logits
        self._captured[size] = logits, replay = kernels.record(work)
        num_threads = kernels.num_threads(logits.device)
        torch.set_num_threads(num_threads if replay is None else 1)
        self._threads[size] = StepThreads(num_threads)
        return logits
