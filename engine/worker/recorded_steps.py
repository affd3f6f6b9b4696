"""Decode steps of few sequences on a CPU, recorded: done again, one costs a single call instead of Python for each operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import kernels
from engine.worker.step_threads import StepThreads

MAX_SEQS = 16  # in more the operations themselves take long


class RecordedSteps:
    """`decode(packed, size)`, which gives logits, recorded for each size when that is first wanted.

    Owns the buffer that packed steps are read from. A model of which PyTorch computes a part is not recorded; of others
    it computes no more than sampling, for which one thread does: more would spin beside those of the kernels.
    """

    def __init__(self, decode: Callable[[Tensor, int], Tensor], buffer: Tensor) -> None:
        self._decode, self._buffer = decode, buffer
        self._recorded: dict[int, tuple[Tensor, Callable[[], None] | None]] = {}
        self._threads: dict[int, StepThreads] = {}  # by size, of steps that are not recorded

    def fits(self, packed: Tensor, size: int) -> bool:
        return size <= MAX_SEQS and len(packed) <= len(self._buffer)

    def run(self, packed: Tensor, size: int) -> Tensor:
        """Logits [size, V] of a step that fits; the next step of this size overwrites them."""
        self._buffer[: len(packed)] = packed
        decode = partial(self._decode, self._buffer, size)
        if (recorded := self._recorded.get(size)) is not None:
            logits, replay = recorded
            if replay is None:
                return self._threads[size].run(decode)
            replay()
            return logits
        self._recorded[size] = logits, replay = kernels.record(decode)
        num_threads = kernels.num_threads(logits.device)
        torch.set_num_threads(num_threads if replay is None else 1)
        self._threads[size] = StepThreads(num_threads)
        return logits
