"""Histograms over steps: tokens of each expert, and tokens computed in a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from engine.core.batch import SchedulerStats

# Inclusive upper bounds of buckets. The last bucket of a histogram is beyond all bounds.
EXPERT_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class ExpertTokens:
    """A histogram per layer with one observation per expert and step. Processes exchange its `changes`."""

    def __init__(self) -> None:
        # Layer → bucket counts (the last bucket is beyond all bounds), then the sum of tokens.
        self.layers: dict[int, list[int]] = {}

    def observe(self, counts: Mapping[int, Sequence[int]]) -> None:
        """Record a step. `counts`: layer → tokens of each expert."""
        for layer, tokens in counts.items():
            row = self._row(layer)
            for each in tokens:
                row[bisect_left(EXPERT_BOUNDS, each)] += 1
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
        return self.layers.setdefault(layer, [0] * (len(EXPERT_BOUNDS) + 2))


class StepTokens:
    """A histogram over steps: prompt tokens computed and tokens generated."""

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_BOUNDS) + 1)  # the last bucket is beyond all bounds
        self.total = 0
        self._before = 0

    def observe(self, stats: SchedulerStats) -> None:
        """Record the statistics after a step."""
        now = stats.prompt_tokens + stats.generation_tokens
        if (num_tokens := now - self._before) > 0:
            self.counts[bisect_left(STEP_BOUNDS, num_tokens)] += 1
            self.total += num_tokens
        self._before = now  # lower than before after a restart
