"""Compares the time of decoding with drafts, and of all that belongs to them, with that of plain decoding."""

from __future__ import annotations

DECAY = 0.99  # weight of earlier steps, for each step since
LEAST_STEPS = 32  # before which nothing is concluded, unless
MUCH = 8.0  # plain steps' time has been lost
TOLERATED = 0.005  # of the time, that may be lost
RECOVERS = 0.01  # of the time of a pause is what was lost before it
LONGEST, LONGEST_DRAFTER = 6.0, 64.0  # a step counts as at most so many plain ones: it may have been interrupted
FIRST_PAUSE, MOST_PAUSE, MOST_DRAFTER = 64, 512, 8192  # steps


class Ledger:
    """Ends drafts for some steps where they have made tokens slower, so that about a hundredth is lost at most.

    The choice of drafts compares steps. It cannot tell what they cost beside: lookups that find nothing, a drafter that
    runs in vain or catches up on tokens, and the slower step after each one with drafts. For a tiny model that may be a
    tenth of the time.
    """

    __slots__ = ("_had_drafter", "_num_steps", "_saved", "_spent", "pause")

    def __init__(self) -> None:
        self.pause = 0  # steps for which there is nothing of drafts
        self._clear()

    def _clear(self) -> None:
        self._num_steps, self._saved, self._spent = 0, 0.0, 0.0  # since the last pause; seconds, decayed
        self._had_drafter = False

    def record(self, seconds: float, plain: float, tokens_each: float, has_drafter: bool = False) -> None:
        """Record a step that gave each request `tokens_each` tokens. `plain`: seconds of a step without drafts.
        `has_drafter`: a drafter on the device ran.
        """
        seconds = min(seconds, (LONGEST_DRAFTER if has_drafter else LONGEST) * plain)
        self._num_steps += 1
        self._had_drafter |= has_drafter
        self._spent = DECAY * self._spent + seconds
        self._saved = DECAY * self._saved + tokens_each * plain - seconds
        lost = -self._saved
        if lost > TOLERATED * self._spent and (self._num_steps >= LEAST_STEPS or lost > MUCH * plain):
            most = MOST_DRAFTER if self._had_drafter else MOST_PAUSE
            self.pause = max(FIRST_PAUSE, min(int(lost / (RECOVERS * plain)), most))
            self._clear()
