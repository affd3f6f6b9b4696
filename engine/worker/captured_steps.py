"""Recorded decode steps of few sequences on a CPU: replaying a step takes one call, without Python per operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import kernels
from engine.worker.parallel.step_threads import StepThreads

MAX_SEQS = 16  # with more, the operations themselves take longer than Python


class RecordedSteps:
    """Records `decode(packed, size)`, which returns logits, for each size at its first use.

    Owns the buffer from which steps read their packed input. A model is not recorded if PyTorch computes a part of it.
    With a recorded model, PyTorch computes only sampling and gets one thread: more would spin beside the kernels'.
    """

    def __init__(self, decode: Callable[[Tensor, int], Tensor], buffer: Tensor) -> None:
        self._decode, self._buffer = decode, buffer
        self._recorded: dict[int, tuple[Tensor, Callable[[], None] | None]] = {}
        self._threads: dict[int, StepThreads] = {}  # by size, for steps that are not recorded

    def fits(self, packed: Tensor, size: int) -> bool:
        return size <= MAX_SEQS and len(packed) <= len(self._buffer)

    def run(self, packed: Tensor, size: int) -> Tensor:
        """Return logits [size, V] of a step that fits. The next step of this size overwrites them."""
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
