"""Estimates the probability that drafts are right, from each request and, for those that begin, from all requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from engine.core.drafts.proposer import BY_MODEL

# Kinds of drafts by what they rest on (`Proposal.basis`): each from so many on. Then those of a drafter by position:
# the first, the second … the last kind is of all further ones.
KINDS = (0, 1, 6, 16, 1 << 20)
LOOKED_UP = 1  # the kind of what follows the fewest tokens that agree
POSITIONS = 6
PRIOR = (0.4, 0.4, 0.6, 0.8, 0.95, *[0.7] * POSITIONS)  # probability of each kind before any was tried
PRIOR_WEIGHT = 3.0  # of what is known of all requests, in trials
OWN_DECAY = 0.9  # weight of a request's earlier trials, for each trial since
ALL_DECAY = 0.98


def kind_of(basis: int, position: int = 0) -> int:
    """Return the kind of the draft token at `position` of a proposal that rests on `basis`."""
    return kinds_of(basis, position + 1)[-1][0]


@lru_cache(maxsize=4096)
def kinds_of(basis: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the kinds of the first tokens of a proposal that rests on `basis`, in order, and how many are of each."""
    found, at = list[tuple[int, int]](), 0
    for kind in range(len(PRIOR)):
        if (basis == BY_MODEL) != (kind >= len(KINDS)):
            continue
        if basis != BY_MODEL:
            end = KINDS[kind + 1] - basis if kind + 1 < len(KINDS) else num_tokens
        else:
            end = kind + 1 - len(KINDS) if kind + 1 < len(PRIOR) else num_tokens
        end = min(end, num_tokens)
        if end > at:
            found.append((kind, end - at))
            at = end
    return tuple(found)


def _alike(basis: int) -> int:
    """Return a basis whose tokens are of the same kinds, one of a few."""
    return basis if basis < KINDS[-2] else KINDS[-2] if basis < KINDS[-1] else KINDS[-1]


class _Trials:
    """A decayed share of trials that succeeded, for each kind."""

    __slots__ = ("decay", "right", "total")

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.right, self.total = [0.0] * len(PRIOR), [0.0] * len(PRIOR)

    def add(self, kind: int, num_right: int, num_wrong: int) -> None:
        """Add trials that succeeded, then others that did not."""
        decay = self.decay
        of_wrong = decay**num_wrong
        of_all = of_wrong * decay**num_right
        self.right[kind] = self.right[kind] * of_all + (of_wrong - of_all) / (1 - decay)
        self.total[kind] = self.total[kind] * of_all + (1 - of_all) / (1 - decay)


class Acceptance:
    """The probability that the next draft token of a request is right, given that those before it are."""

    __slots__ = ("_all", "_own")

    def __init__(self, earlier: Acceptance | None = None) -> None:
        """`earlier`: of all requests, which this one adds to; None: this is of all requests."""
        self._own = _Trials(ALL_DECAY if earlier is None else OWN_DECAY)
        self._all = None if earlier is None else earlier._own

    def record(self, basis: int, num_right: int, num_tried: int) -> None:
        """Record that `num_right` first tokens of a proposal of `num_tried` tokens were right."""
        left = num_right
        for kind, count in kinds_of(_alike(basis), min(num_right + 1, num_tried)):
            right = min(left, count)
            left -= right
            self._own.add(kind, right, count - right)
            if self._all is not None:
                self._all.add(kind, right, count - right)

    def of_kind(self, kind: int) -> float:
        """Return the probability that a token of this kind is right."""
        expected = PRIOR[kind]
        for trials in (self._all, self._own):
            if trials is not None:
                expected = (trials.right[kind] + PRIOR_WEIGHT * expected) / (trials.total[kind] + PRIOR_WEIGHT)
        return expected

    def survival(self, basis: int, num_tokens: int) -> Sequence[float]:
        """Return for each token of a proposal the probability that it and all before it are right."""
        found, survives = list[float](), 1.0
        for kind, count in kinds_of(_alike(basis), num_tokens):
            right = self.of_kind(kind)
            for _ in range(count):
                survives *= right
                found.append(survives)
        return found
