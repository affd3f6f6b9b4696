"""Captured steps of few decoding sequences on a CPU: a replay takes one call, without Python for each operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from engine.worker.decode_step import DecodeStep
from engine.worker.executor import Computed, Padding, StepRequest, WholeLogits
from engine.worker.input_batch import PackedStep
from engine.worker.parallel.step_threads import StepThreads
from engine.worker.sampling.sampler import Sampler

Outcome = tuple[Tensor, Tensor | None]  # logits [T, V]; tokens [T] int64
MAX_TOKENS = 16  # with more, the operations themselves take longer than Python


class Size(NamedTuple):
    """The parts of a captured step, beside the logits of all its tokens."""

    num_seqs: int
    num_tokens: int  # more with drafts
    samples: bool  # the likeliest token after every one; else another part of the step samples


class CapturedSteps:
    """Captures a decode step, with or without drafts, for each size at its first use.

    Owns the buffer from which steps read their packed input. A model is not captured if PyTorch computes a part of it.
    With a captured model, PyTorch computes only sampling and gets one thread: more would spin beside the kernels'.
    """

    def __init__(self, work: DecodeStep, sampler: Sampler, buffer: Tensor) -> None:
        self._work, self._sampler, self._buffer = work, sampler, buffer
        self._captured: dict[Size, tuple[Outcome, Callable[[], None] | None]] = {}
        self._threads: dict[Size, StepThreads] = {}  # for steps that are not captured

    @property
    def max_words(self) -> int:
        return len(self._buffer)

    def fits(self, step: StepRequest) -> Padding | None:
        is_plain = step.samples_every_token and not step.needs_every_token and not step.has_adapters
        fits = is_plain and step.batch.total_num_tokens <= MAX_TOKENS
        return Padding() if fits else None

    def run(self, step: StepRequest, packed: PackedStep) -> Computed:
        """Compute a step. The next step of this size overwrites its logits and tokens."""
        self._buffer[: len(packed.packed)] = packed.packed
        members = packed.members
        samples = members.greedy and (not members.samples.has_drafts or members.samples.all_drafted)
        logits, tokens = self._outcome(Size(packed.num_seqs, packed.num_tokens, samples))
        return Computed(logits=WholeLogits(logits, self._sampler), tokens=tokens)

    def _outcome(self, size: Size) -> Outcome:
        work = partial(self._compute, size)
        if (captured := self._captured.get(size)) is not None:
            outcome, replay = captured
            if replay is None:
                return self._threads[size].run(work)
            replay()
            return outcome
        self._captured[size] = outcome, replay = kernels.record(work)
        num_threads = kernels.num_threads(self._buffer.device)
        torch.set_num_threads(num_threads if replay is None else 1)
        self._threads[size] = StepThreads(num_threads)
        return outcome

    def _compute(self, size: Size) -> Outcome:
        logits = self._work.logits(self._buffer, size.num_seqs, size.num_tokens)
        if not size.samples:
            return logits, None
        stores = size.num_tokens == size.num_seqs  # rows with drafts are set once these are compared
        return logits, self._sampler.sample_unfiltered(logits, greedy=True, stores=stores)
