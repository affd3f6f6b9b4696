"""Acceptance that does not depend on what was proposed, to compare engines at equal acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Of a position to a number of 32 bits: factors and shifts, as in hash functions.
MIXING = ((0x9E3779B1, 15), (0x85EBCA77, 13), (0xC2B2AE3D, 16))


@dataclass(frozen=True, slots=True)
class ImposedAcceptance:
    """Accepts drafts by their positions instead of comparing them, for benchmarks: answers mean nothing then."""

    threshold: int  # of 2^32: the part of the drafts that is accepted

    @classmethod
    def of_length(cls, length: float, num_drafts: int) -> ImposedAcceptance:
        """Accept so many that a request with `num_drafts` drafts gets `length` tokens of a step on average."""
        low, high = 0.0, 1.0
        for _ in range(50):
            rate = (low + high) / 2
            if 1 + sum(rate**i for i in range(1, num_drafts + 1)) < length:
                low = rate
            else:
                high = rate
        return cls(round(high * 2**32))

    def accepts(self, positions: Any) -> Any:
        """Return whether the drafts at these positions are accepted: an integer, or a tensor of them."""
        mixed = positions
        for factor, shift in MIXING:
            mixed = mixed * factor & 0xFFFFFFFF
            mixed = mixed ^ (mixed >> shift)
        return mixed < self.threshold
