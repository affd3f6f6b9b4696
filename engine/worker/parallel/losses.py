"""The loss of a rank, reported to the threads that wait for it."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

from engine.worker.parallel.launcher import Lost

LOSS_SECONDS = 5  # time within which the exit of a follower is noticed
POLL_SECONDS = 1.0  # between a waiting thread's looks


class RankLostError(Exception):
    """A rank was lost: its runner cannot be used any more. The message says which rank, and how."""


class Losses:
    """Reports the loss of ranks of one model, and makes waits for them fail, if this process goes on at all."""

    def __init__(self, report: Lost) -> None:
        self._report, self._reason = report, ""
        self._happened = threading.Event()

    def __call__(self, reason: str) -> bool:
        """Report a loss, in the thread that has noticed it. Returns whether this process goes on."""
        if not self._report(reason):
            return False
        self._reason = self._reason or reason
        self._happened.set()
        return True

    def __bool__(self) -> bool:
        """Return whether a rank was lost and this process goes on."""
        return self._happened.is_set()

    def check(self, seconds: float = 0) -> None:
        """Raise `RankLostError` if a rank was lost, or is reported as lost within so many seconds. If this process ends
        for it, that happens meanwhile.
        """
        if self._happened.wait(seconds):
            raise RankLostError(self._reason) from None


class Answers:
    """A follower's answers to rank 0, in order."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._queue: SimpleQueue[list[int]] = SimpleQueue()

    def put(self, answer: list[int]) -> None:
        self._queue.put(answer)

    def get(self) -> list[int]:
        """Wait for the next answer. Raises `RankLostError`."""
        while True:
            try:
                return self._queue.get(timeout=POLL_SECONDS)
            except Empty:
                self._losses.check()
