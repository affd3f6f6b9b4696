"""Decides in which steps a drafter on the device runs: it proposes, keeps up with the target, or rests."""

from __future__ import annotations

USELESS = 16  # proposals in a row that gave no drafts, after which there are few
PROBE_INTERVAL = 64  # steps before the first of these, twice as many before the next
NUM_PROBES = 2  # that gave no drafts either, after which the drafter rests
FIRST_REST, MOST_REST = 1024, 16384  # steps of the first rest, and of the longest: each is twice as long


class DrafterCalls:
    """A drafter that proposes nothing in a step still has to keep up: it computes what the target computes, now or
    later. While it rests it does nothing. So it knows the requests of these steps no more, and after a rest it begins
    with a new request.
    """

    __slots__ = ("_is_resting", "_next_probe", "_num_probes", "_num_rests", "_num_useless", "_rest_left")

    def __init__(self) -> None:
        self._num_useless = 0  # steps with proposals in a row that gave no drafts
        self._num_probes = self._next_probe = 0
        self._is_resting = False
        self._rest_left = 0  # steps
        self._num_rests = 0  # since proposals gave drafts

    @property
    def is_resting(self) -> bool:
        return self._is_resting

    def proposes(self) -> bool:
        """Return whether the drafter proposes after the next step, if drafts may pay then."""
        if self._is_resting:
            return False
        if self._num_useless >= USELESS:
            self._next_probe -= 1
            if self._next_probe > 0:
                return False
            if self._num_probes == NUM_PROBES or self._num_rests:
                self.rest(min(FIRST_REST << self._num_rests, MOST_REST))
                return False
            self._next_probe = PROBE_INTERVAL << self._num_probes
            self._num_probes += 1
        self._num_useless += 1
        return True

    def gave_drafts(self) -> None:
        """Note that the next step has drafts of the drafter."""
        self._num_useless = self._num_probes = self._next_probe = self._num_rests = 0

    def rest(self, num_steps: int) -> None:
        """Let the drafter do nothing for so many steps, and until a request begins."""
        self._is_resting, self._rest_left = True, num_steps
        self._num_useless = self._num_probes = self._next_probe = 0
        self._num_rests = min(self._num_rests + 1, MOST_REST.bit_length())

    def rests(self, begins: bool) -> bool:
        """Return whether the drafter does nothing in the step that was planned. `begins`: a request begins in it."""
        if self._is_resting:
            self._rest_left -= 1
            self._is_resting = self._rest_left > 0 or not begins
        return self._is_resting
