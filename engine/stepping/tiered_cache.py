"""Connects the prefix cache's tier in host memory with the worker that copies its blocks."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.scheduler import Scheduler
from engine.worker.interface import Runner


class TieredCache:
    """Tells the scheduler, before each step, which loads have arrived and how much host memory there is."""

    def __init__(self, scheduler: Scheduler, runner: Callable[[], Runner]) -> None:
        """`runner`: returns the one that runs now."""
        self._scheduler, self._runner = scheduler, runner
        self._num_slots: list[int] = []

    def before_step(self) -> None:
        tier = self._scheduler.blocks.tier
        if tier is None:
            return
        runner = self._runner()
        if tier.has_loads:
            self._scheduler.arrived(runner.finished_loads())
        num_slots = runner.num_host_slots
        if num_slots != self._num_slots:
            tier.resize(num_slots)
            self._num_slots = num_slots

    def wait(self) -> None:
        """Wait for blocks on their way, if there are any: nothing else can be done."""
        tier = self._scheduler.blocks.tier
        if tier is not None and tier.has_loads:
            self._runner().wait_for_load()
