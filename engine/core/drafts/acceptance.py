"""Estimates the probability that drafts are right, from each request and, for those that begin, from all requests."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.drafts.proposer import BY_MODEL

# Kinds of drafts by what they rest on (`Proposal.basis`): each from so many on. Then those of a drafter by position:
# the first, the second … the last kind is of all further ones.
KINDS = (0, 6, 16, 1 << 20)
POSITIONS = 6
PRIOR = (0.4, 0.6, 0.8, 0.95, *[0.7] * POSITIONS)  # probability of each kind before any was tried
PRIOR_WEIGHT = 3.0  # of what is known of all requests, in trials
OWN_DECAY = 0.9  # weight of a request's earlier trials, for each trial since
ALL_DECAY = 0.98


def kind_of(basis: int, position: int = 0) -> int:
    """Return the kind of the draft token at `position` of a proposal that rests on `basis`."""
    if basis == BY_MODEL:
        return len(KINDS) + min(position, POSITIONS - 1)
    kind, basis = 0, basis + position
    while kind + 1 < len(KINDS) and basis >= KINDS[kind + 1]:
        kind += 1
    return kind


class _Trials:
    """A decayed share of trials that succeeded, for each kind."""

    __slots__ = ("decay", "right", "total")

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.right, self.total = [0.0] * len(PRIOR), [0.0] * len(PRIOR)

    def add(self, kind: int, is_right: bool) -> None:
        self.right[kind] = self.right[kind] * self.decay + is_right
        self.total[kind] = self.total[kind] * self.decay + 1


class Acceptance:
    """The probability that the next draft token of a request is right, given that those before it are."""

    __slots__ = ("_all", "_own")

    def __init__(self, earlier: Acceptance | None = None) -> None:
        """`earlier`: of all requests, which this one adds to; None: this is of all requests."""
        self._own = _Trials(ALL_DECAY if earlier is None else OWN_DECAY)
        self._all = None if earlier is None else earlier._own

    def record(self, basis: int, num_right: int, num_tried: int) -> None:
        """Record that `num_right` first tokens of a proposal of `num_tried` tokens were right."""
        for i in range(min(num_right + 1, num_tried)):
            kind = kind_of(basis, i)
            self._own.add(kind, i < num_right)
            if self._all is not None:
                self._all.add(kind, i < num_right)

    def of_kind(self, kind: int) -> float:
        """Return the probability that a token of this kind is right."""
        expected = PRIOR[kind]
        for trials in (self._all, self._own):
            if trials is not None:
                expected = (trials.right[kind] + PRIOR_WEIGHT * expected) / (trials.total[kind] + PRIOR_WEIGHT)
        return expected

    def survival(self, basis: int, num_tokens: int) -> Sequence[float]:
        """Return for each token of a proposal the probability that it and all before it are right."""
        found, survives, earlier, right = [], 1.0, -1, 0.0
        for i in range(num_tokens):
            kind = kind_of(basis, i)
            if kind != earlier:
                earlier, right = kind, self.of_kind(kind)
            survives *= right
            found.append(survives)
        return found
