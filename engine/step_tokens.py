"""Statistics of the tokens computed per step."""

from __future__ import annotations

from bisect import bisect_left

from engine.core.batch import SchedulerStats

BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # inclusive upper bounds of buckets


class StepTokens:
    """A histogram over steps: prompt tokens computed and tokens generated."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)  # the last bucket is beyond all bounds
        self.total = 0
        self._before = 0

    def see(self, stats: SchedulerStats) -> None:
        """Record the statistics after a step."""
        now = stats.prompt_tokens + stats.generation_tokens
        if (num_tokens := now - self._before) > 0:
            self.counts[bisect_left(BOUNDS, num_tokens)] += 1
            self.total += num_tokens
        self._before = now  # lower than before after a restart
