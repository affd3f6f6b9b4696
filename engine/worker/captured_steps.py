"""Captured steps of few decoding sequences on a CPU: a replay takes one call, without Python for each operation."""

from __future__ import annotations

from dataclasses import dataclass
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
MAX_TOKENS = 64
MOST_BYTES = 512 << 20  # of captured steps' memory
UNUSED = 2000  # steps after which a captured one is dropped if another size wants memory


class Size(NamedTuple):
    """The parts of a captured step, beside the logits of all its tokens."""

    num_seqs: int
    num_tokens: int  # more with drafts
    samples: bool  # the argmax after every token; else another part of the step samples
    has_adapters: bool = False  # some sequences may use LoRA adapters


@dataclass(slots=True)
class _Captured:
    """A captured step, and when it ran last: the number of steps by then."""

    step: kernels.Recorded[Outcome]
    last_used: int


class CapturedSteps:
    """Captures a decode step, with or without drafts, for each size at its first use, as long as there is memory.

    Owns the buffer from which steps read their packed input. A model is not captured if PyTorch computes a part of it.
    With a captured model, PyTorch computes only sampling and gets one thread: more would spin beside the kernels'.
    """

    def __init__(self, work: DecodeStep, sampler: Sampler, buffer: Tensor, most_bytes: int = MOST_BYTES) -> None:
        self._work, self._sampler, self._buffer = work, sampler, buffer
        self._captured: dict[Size, _Captured] = {}
        self._threads: dict[Size, StepThreads] = {}  # for steps that are not captured
        self._free_bytes, self._token_bytes = most_bytes, 0  # what a captured step takes for each token
        self._num_steps = 0

    @property
    def max_words(self) -> int:
        return len(self._buffer)

    def fits(self, step: StepRequest) -> Padding | None:
        is_plain = step.samples_every_token and not step.needs_every_token
        fits = is_plain and step.batch.total_num_tokens <= MAX_TOKENS
        return Padding() if fits else None

    def run(self, step: StepRequest, packed: PackedStep) -> Computed:
        """Compute a step. The next step of this size overwrites its logits and tokens."""
        self._buffer[: len(packed.packed)] = packed.packed
        members = packed.members
        logits, tokens = self._outcome(Size(packed.num_seqs, packed.num_tokens, members.greedy, step.has_adapters))
        if tokens is not None and members.samples.has_drafts and not members.samples.all_drafted:
            self._sampler.store_undrafted(tokens, members.samples)
        return Computed(logits=WholeLogits(logits, self._sampler), tokens=tokens)

    def _outcome(self, size: Size) -> Outcome:
        self._num_steps += 1
        if (captured := self._captured.get(size)) is not None:
            captured.last_used = self._num_steps
            step = captured.step
            if step.replay is None:
                return self._threads[size].run(partial(self._compute, size))
            step.replay()
            return step.result
        return self._capture(size) if self._has_room(size) else self._compute(size)

    def _capture(self, size: Size) -> Outcome:
        step = kernels.record(partial(self._compute, size))
        self._captured[size] = _Captured(step, self._num_steps)
        self._free_bytes -= step.num_bytes
        self._token_bytes = max(self._token_bytes, -(-step.num_bytes // size.num_tokens))
        num_threads = kernels.num_threads(self._buffer.device)
        torch.set_num_threads(num_threads if step.replay is None else 1)
        self._threads[size] = StepThreads(num_threads)
        return step.result

    def _has_room(self, size: Size) -> bool:
        """Make room for another captured step if need be, and return whether there is."""
        needed = self._token_bytes * size.num_tokens
        if needed > self._free_bytes:
            for each, captured in list(self._captured.items()):
                if self._num_steps - captured.last_used > UNUSED:
                    self._free_bytes += captured.step.num_bytes
                    del self._captured[each], self._threads[each]
        return needed <= self._free_bytes

    def _compute(self, size: Size) -> Outcome:
        logits = self._work.logits(self._buffer, size.num_seqs, size.num_tokens, has_adapters=size.has_adapters)
        if not size.samples:
            return logits, None
        stores = size.num_tokens == size.num_seqs  # rows with drafts are set once these are compared
        return logits, self._sampler.sample_unfiltered(logits, greedy=True, stores=stores)
