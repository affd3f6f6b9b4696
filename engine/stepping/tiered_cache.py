"""Connects the tiers of the prefix cache with what copies their blocks: the worker, and the prefix cache's file."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.scheduler import Scheduler
from engine.stepping.prefix_cache_store import Store
from engine.worker.interface import Runner


class TieredCache:
    """Tells the scheduler, before each step, which loads have arrived and how much host memory there is."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Callable[[], Runner],
        store: Callable[[], Store | None],
        has_host: bool,
    ) -> None:
        """`runner`, `store`: return the ones that run now. `has_host`: the runner keeps blocks in host memory."""
        self._scheduler, self._runner, self._store, self._has_host = scheduler, runner, store, has_host
        self._num_slots: list[int] = []

    def before_step(self) -> None:
        tier = self._scheduler.blocks.tier
        if tier is None:
            return
        if (store := self._store()) is not None:
            store.step()
        if not self._has_host:
            return
        runner = self._runner()
        if tier.has_loads:
            self._scheduler.arrived(runner.finished_loads())
        num_slots = runner.num_host_slots
        if num_slots != self._num_slots:
            tier.resize(num_slots)
            self._num_slots = num_slots

    def after_launch(self) -> None:
        """Begin to read from the file what the launched step's loads need."""
        if (store := self._store()) is not None:
            store.begin_reads()

    def wait(self) -> None:
        """Wait for blocks on their way, if there are any: nothing else can be done."""
        tier = self._scheduler.blocks.tier
        if tier is None or not tier.has_loads:
            return
        if tier.copies_from_host:
            self._runner().wait_for_load()
        elif (store := self._store()) is not None:
            store.wait()
