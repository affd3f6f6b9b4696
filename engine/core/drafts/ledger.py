"""Compares the time of decoding with drafts, and of all that belongs to them, with that of plain decoding."""

from __future__ import annotations

DECAY = 0.99  # weight of earlier steps, for each step since
LEAST_STEPS = 32  # before which nothing is concluded
TOLERATED = 0.005  # of the time, that may be lost
LONGEST = 8.0  # a step counts as at most so many plain ones: it may have been interrupted
FIRST_PAUSE = 64  # steps, and twice as many each time, up to
MOST_PAUSE = 512


class Ledger:
    """Ends drafts for some steps where they have made tokens slower.

    The choice of drafts compares steps. It cannot tell what they cost beside: lookups that find nothing, a drafter that
    runs in vain, and the slower step after each one with drafts. For a tiny model that may be a tenth of the time.
    """

    __slots__ = ("_length", "_num_steps", "_saved", "_spent", "pause")

    def __init__(self) -> None:
        self._num_steps, self._saved, self._spent = 0, 0.0, 0.0  # since the last pause; seconds, decayed
        self.pause = 0  # steps for which there is nothing of drafts
        self._length = FIRST_PAUSE  # of the next pause

    def record(self, seconds: float, plain: float, tokens_each: float) -> None:
        """Record a step that gave each request `tokens_each` tokens. `plain`: seconds of a step without drafts."""
        seconds = min(seconds, LONGEST * plain)
        self._num_steps += 1
        self._spent = DECAY * self._spent + seconds
        self._saved = DECAY * self._saved + tokens_each * plain - seconds
        if self._num_steps < LEAST_STEPS:
            return
        if self._saved < -TOLERATED * self._spent:
            self.pause, self._length = self._length, min(2 * self._length, MOST_PAUSE)
            self._num_steps, self._saved, self._spent = 0, 0.0, 0.0
        elif self._saved > TOLERATED * self._spent:
            self._length = FIRST_PAUSE
