"""Native calls that wait for each other and are made at once: Python, which comes between two of them otherwise, would
find nothing of its own in the caches after each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kernels.cpu.library import Waiting, library
from kernels.cpu.step import MAY_COPY, MEMORY, VIEWS, Watch

R = TypeVar("R")

MOST_BYTES = 32 << 20  # of memory that waiting calls hold, and others could have had
FEW_CALLS = 4  # of a batch: not worth a look at each of PyTorch's operations
MANY_OPERATIONS = 8  # of PyTorch for each call: looking at them costs more than the batches gain
REST = 64  # pieces of work that are done as usual in either case


class _Batching(Watch):
    """Makes the calls that wait before PyTorch computes anything, since it may read what they write, and before they
    hold much memory.
    """

    def __init__(self, waiting: Waiting) -> None:
        super().__init__()
        self._waiting, self._num_bytes, self.num_operations = waiting, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        name = func.overloadpacket.__name__
        reads = name not in VIEWS or (name in MAY_COPY and not args[0].is_contiguous())
        if reads or self._num_bytes > MOST_BYTES:
            self._waiting.make()
            self._num_bytes = 0
        result = func(*args, **(kwargs or {}))
        if name in MEMORY:
            self._num_bytes += result.nbytes
        return result


class CallBatches:
    """Does work with its native calls in batches, as long as these come about."""

    def __init__(self) -> None:
        self._rest = 0

    def run(self, work: Callable[[], R]) -> R:
        """Do some work. It must read what its native calls write by operations of PyTorch only, not by `tolist`."""
        native = library()
        if native is None or native.recording is not None or native.waiting is not None:
            return work()
        if self._rest:
            self._rest -= 1
            return work()
        native.waiting = waiting = Waiting(native)
        try:
            with _Batching(waiting) as seen:
                result = work()
            waiting.make()
        finally:
            native.waiting = None
        have_few_calls = waiting.num_calls < FEW_CALLS * waiting.num_batches
        if have_few_calls or seen.num_operations > MANY_OPERATIONS * waiting.num_calls:
            self._rest = REST
        return result
