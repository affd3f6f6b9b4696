"""Compares the time of decoding with drafts, and of all that belongs to them, with that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.request import Request

DECAY = 0.99  # weight of earlier steps, for each step since
LEAST_STEPS = 32  # before which nothing is concluded, unless
MUCH = 8.0  # plain steps' time has been lost
TOLERATED = 0.005  # of the time, that may be lost
RECOVERS = 0.006  # of the time of a pause is what was lost before it
LONGEST, LONGEST_DRAFTER = 6.0, 64.0  # a step counts as at most so many plain ones: it may have been interrupted
FIRST_PAUSE, MOST_PAUSE, MOST_DRAFTER = 64, 512, 8192  # steps
MOST_REQUESTS = 256  # with drafts since the last pause, whose gains are told apart
Part = tuple[Request, int, float]  # of a step: request, its drafts, and the tokens that it got beside its first one


class Ledger:
    """Ends drafts for some steps where they have made tokens slower, so that less than a hundredth is lost.

    The choice of drafts compares steps. It cannot tell what they cost beside: lookups that find nothing, a drafter that
    runs in vain or catches up on tokens, and the slower step after each one with drafts. For a tiny model that may be a
    tenth of the time.

    If the drafts of some requests have lost the time, only these requests pause.
    """

    __slots__ = ("_had_drafter", "_num_steps", "_saved", "_saved_by", "_spent", "pause")

    def __init__(self) -> None:
        self.pause = 0  # steps for which there is nothing of drafts
        self._clear()

    def _clear(self) -> None:
        self._num_steps, self._saved, self._spent = 0, 0.0, 0.0  # since the last pause; seconds, decayed
        self._had_drafter = False
        self._saved_by: dict[Request, float] = {}

    def record(
        self, seconds: float, plain: float, parts: Sequence[Part], has_drafter: bool = False
    ) -> Sequence[Request]:
        """Record a step. `plain`: seconds of one without drafts. `parts`: of the requests with drafts, whose further
        tokens count as a part of the step's number of requests. `has_drafter`: a drafter on the device ran.

        Returns the requests that are to get no drafts for a while.
        """
        seconds = min(seconds, (LONGEST_DRAFTER if has_drafter else LONGEST) * plain)
        num_drafts = sum(number for _, number, _ in parts)
        if len(self._saved_by) > MOST_REQUESTS:
            self._saved_by.clear()
        for request, number, tokens_each in parts:
            saved = tokens_each * plain - (seconds - plain) * number / num_drafts
            self._saved_by[request] = self._saved_by.get(request, 0.0) + saved
        self._num_steps += 1
        self._had_drafter |= has_drafter
        self._spent = DECAY * self._spent + seconds
        self._saved = DECAY * self._saved + plain - seconds + plain * sum(each for *_, each in parts)
        lost = -self._saved
        if lost <= TOLERATED * self._spent or (self._num_steps < LEAST_STEPS and lost <= MUCH * plain):
            return ()
        losing = {request: -saved for request, saved in self._saved_by.items() if saved < 0}
        is_theirs = len(losing) < len(self._saved_by) and sum(losing.values()) >= lost and not self._had_drafter
        if not is_theirs:
            most = MOST_DRAFTER if self._had_drafter else MOST_PAUSE
            self.pause = max(FIRST_PAUSE, min(int(lost / (RECOVERS * plain)), most))
        self._clear()
        return list(losing) if is_theirs else ()
