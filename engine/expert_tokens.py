"""Load balance of mixture-of-experts layers: tokens of each expert in the observed steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # of the buckets, inclusive


class ExpertTokens:
    """A histogram per layer with one observation per expert and step. Processes exchange its `changes`."""

    def __init__(self) -> None:
        # Layer → bucket counts, of which the last is beyond all bounds, then the sum of tokens.
        self.layers: dict[int, list[int]] = {}

    def see(self, counts: Mapping[int, Sequence[int]]) -> None:
        """Record a step. `counts`: layer → tokens of each expert."""
        for layer, tokens in counts.items():
            row = self._row(layer)
            for each in tokens:
                row[bisect_left(BOUNDS, each)] += 1
            row[-1] += sum(tokens)

    def take(self) -> dict[int, list[int]]:
        """Return the changes since the last call."""
        changes, self.layers = self.layers, {}
        return changes

    def add(self, changes: Mapping[int, Sequence[int]]) -> None:
        for layer, change in changes.items():
            row = self._row(layer)
            for index, each in enumerate(change):
                row[index] += each

    def _row(self, layer: int) -> list[int]:
        return self.layers.setdefault(layer, [0] * (len(BOUNDS) + 2))
