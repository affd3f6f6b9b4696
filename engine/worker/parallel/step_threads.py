"""Chooses PyTorch's number of threads for a step on a CPU: all, or one while that is faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

R = TypeVar("R")

TRY_EVERY = 64  # steps
FAR_LONGER = 1.5  # factor of a step's duration over the shortest
TRY_STEPS = 2  # steps with the other number of threads, of which the last one counts
NEWEST = 0.25  # weight of the newest step in the moving average


class StepThreads:
    """Times the steps of one kind and chooses their number of threads.

    PyTorch's threads synchronise after each operation. Several threads are therefore slower for small models, and for
    any model while another process keeps one of the cores busy. One thread is tried when steps take far longer than
    before; all threads are tried from time to time.
    """

    def __init__(
        self,
        most: int,
        set_num_threads: Callable[[int], None] = torch.set_num_threads,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._most, self._set_num_threads, self._clock = most, set_num_threads, clock
        self._seconds = {most: 0.0, 1: 0.0}  # duration of a step, by number of threads; 0: not known yet
        self._least = float("inf")  # shortest step with all threads
        self._num_steps = 0

    def run(self, step: Callable[[], R]) -> R:
        """Run a step. Afterwards PyTorch uses all threads again."""
        best, other = sorted(self._seconds, key=self._seconds.__getitem__) if self._most > 1 else (1, 1)
        index = self._num_steps % TRY_EVERY
        self._num_steps += 1
        is_try = index >= TRY_EVERY - TRY_STEPS and (best == 1 or self._seconds[best] > FAR_LONGER * self._least)
        self._set_num_threads(num_threads := other if is_try else best)
        begin = self._clock()
        try:
            return step()
        finally:
            seconds, before = self._clock() - begin, self._seconds[num_threads]
            self._set_num_threads(self._most)
            if num_threads == self._most:
                self._least = min(self._least, seconds)
            self._seconds[num_threads] = seconds if is_try or not before else before + NEWEST * (seconds - before)
