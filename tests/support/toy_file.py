"""A prefix cache file of a toy worker's blocks: late, and with every fault that a disk has."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from engine.core.kv.block_pool import Name
from engine.worker.block_store.block_file import EndedSave, Found
from engine.worker.block_store.cache_file import Entry
from tests.support.toy import POISON, ToyRunner


class ToyFile:
    """Stands for a `BlockFile` as `PrefixCacheStore` uses it. Jobs are done in order, some time later."""

    path = Path("toy")

    def __init__(self, runner: ToyRunner, rng: Random, num_slots: int, faults: float, pool: int) -> None:
        """`faults`: the part of the blocks that cannot be written, and of those that are lost. `pool`: whose blocks."""
        self.num_slots, self.max_blocks = num_slots, rng.choice([1, 3, 8])
        self.block_bytes = rng.choice([1 << 16, 1 << 20])  # blocks that are saved at a time: several, or one
        self.has_failed = False
        self.slots: dict[int, tuple[Name, list[int]]] = {}
        self.reads = self
        self.events: Counter[str] = Counter()
        self._runner, self._rng, self._faults, self._pace = runner, rng, faults, rng.choice([0.2, 0.8, 1.0])
        self._pool = pool
        self._jobs: deque[tuple[Callable[..., list[EndedSave]], Any]] = deque()
        self._ended: list[EndedSave] = []
        self._wanted: list[tuple[int, Sequence[tuple[int, Name, int]]]] = []

    def entries(self) -> list[Entry]:
        return [Entry(slot, name, slot, b"") for slot, (name, _) in self.slots.items() if slot < self.num_slots]

    def load(self, slots: Sequence[tuple[int, Name]], block_ids: Sequence[int], seconds: float) -> list[Found]:
        """There is no time to load anything."""
        return [Found.UNREAD for _ in slots]

    def can_save(self, wait: float = 0) -> bool:
        return self._rng.random() < self._pace

    def save(self, blocks: Sequence[tuple[int, int, Name, int]]) -> None:
        assert len(blocks) <= self.max_blocks
        contents = [self._runner.read_block(block_id, self._pool) for block_id, *_ in blocks]
        pairs = zip(blocks, contents, strict=True)
        self._jobs.append((self._write, [(None, slot, name, content) for (_, slot, name, _), content in pairs]))

    def save_from_host(self, blocks: Sequence[tuple[int, int, Name, int]]) -> None:
        assert len(blocks) <= self.max_blocks
        self._jobs.append((self._write, [(place, slot, name, None) for place, slot, name, _ in blocks]))

    def _write(self, blocks: list[tuple[int | None, int, Name, list[int] | None]]) -> list[EndedSave]:
        ended = []
        for place, slot, name, given in blocks:
            content = given if place is None else self._runner.host[self._pool, place]
            assert content is not None
            assert POISON not in content, "a block that is not there is saved"
            self.slots.pop(slot, None)
            self.has_failed |= self._rng.random() < self._faults
            if not self.has_failed:
                self.slots[slot] = name, content
            self.events["blocks to the file" if not self.has_failed else "blocks that the disk had no room for"] += 1
            ended.append(EndedSave(slot, name, not self.has_failed, place))
        return ended

    def erase(self, slots: Sequence[int]) -> None:
        self._jobs.append((self._erase, slots))

    def _erase(self, slots: Sequence[int]) -> list[EndedSave]:
        for slot in slots:
            self.slots.pop(slot, None)
        return []

    def retry(self) -> None:
        self.has_failed = False

    def ended_saves(self) -> list[EndedSave]:
        while self._jobs and self._rng.random() < self._pace:
            self._do_next()
        ended, self._ended = self._ended, []
        return ended

    def _do_next(self) -> None:
        work, given = self._jobs.popleft()
        self._ended += work(given)

    def clear(self) -> None:
        while self._jobs:
            self._do_next()
        self.slots.clear()

    def begin(self, number: int, blocks: Sequence[tuple[int, Name, int]]) -> None:
        self._runner.poison((block_id for *_, block_id in blocks), self._pool)
        self._wanted.append((number, blocks))

    def finished(self, is_wanted: Callable[[int], bool]) -> list[tuple[int, list[tuple[int, Name]]]]:
        ended = []
        while self._wanted and self._rng.random() < self._pace:
            number, blocks = self._wanted.pop(self._rng.randrange(len(self._wanted)))
            failed = []
            for slot, name, block_id in blocks:
                if self._rng.random() < self._faults:
                    self.slots.pop(slot, None)
                found, content = self.slots.get(slot, (None, []))
                if found != name:
                    failed.append((slot, name))
                elif is_wanted(number):
                    self._runner.write_block(block_id, content, self._pool)
                    self.events["blocks from the file"] += 1
                    self.events["blocks from another pool's file"] += self._pool > 0
            self.events["blocks that the file has lost"] += len(failed)
            ended.append((number, failed))
        return ended

    def close(self, heats: object = ()) -> None:
        self._wanted.clear()
