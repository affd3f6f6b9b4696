"""Steps that were launched on the device and not read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from engine.worker.interface import Handle

P = ParamSpec("P")
T = TypeVar("T")


class StepFailedError(Exception):
    """A step failed on the device, possibly because of one of its requests."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def on_device(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call what may fail because of one request. Other errors, such as those of the scheduler, end the engine."""
    try:
        return call(*args, **options)
    except Exception as error:
        raise StepFailedError(error) from None


class UnreadSteps:
    """Steps in flight, in launch order, so that the device never waits for the CPU.

    In a pipeline, each stage has a step.
    """

    def __init__(self, num_stages: int) -> None:
        self._steps: deque[Handle] = deque()
        self._most = max(num_stages - 1, 1)  # after each step of the engine

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, launched: Handle) -> None:
        self._steps.append(launched)

    def take_oldest(self, launched: Handle | None) -> Handle | None:
        """Return the oldest step, if no further one may stay unread or nothing was launched."""
        is_full = launched is None or len(self._steps) == self._most
        return self._steps.popleft() if self._steps and is_full else None

    def clear(self) -> None:
        """Forget steps whose results are lost."""
        self._steps.clear()
