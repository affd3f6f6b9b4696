"""Files of two ranks, each with its part of every block: a block is there where both have it, and an error ends
nothing.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.shard import Stage
from engine.worker.block_store.block_copier import BlockCopier
from engine.worker.block_store.block_file import BlockFile, BlockFileOptions, Found, open_block_file
from engine.worker.block_store.cache_file import ALIGNMENT, Name
from engine.worker.device import CpuDevice
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.parallel.losses import Answers, Losses
from engine.worker.parallel.rank_files import FileCall, Followers, Leader, of_rank
from tests.support.kv_tensors import allocate_kv

NUM_BLOCKS = 8
SLOT_BYTES = 8192  # of the blocks below
SAVES = [(block_id, 7 - block_id, (0, bytes([block_id]) * 32), block_id) for block_id in range(1, 6)]
SLOTS = [(slot, name) for _, slot, name, _ in SAVES]
ALL, NONE = [Found.LOADED] * 5, [Found.INVALID] * 5


class Rank:
    """A rank's KV cache, filled with random numbers."""

    def __init__(self, index: int, stage: Stage) -> None:
        self.index = index
        layout = KVCacheLayout.of([0, 0, 0], num_kv_heads=1, head_dim=64, block_size=4, dtype=torch.float32)
        self.layout = replace(layout, own_layers=stage.layers(3))
        self.kv_cache = allocate_kv(self.layout, NUM_BLOCKS, CpuDevice())
        self.copier = BlockCopier(self.kv_cache, self.layout, CpuDevice(), 2)
        self.io = ThreadPoolExecutor(1)
        self.forget()
        self.file: BlockFile | None = None

    def forget(self) -> None:
        for kv in self.kv_cache:
            kv.normal_()

    def content(self) -> list[Tensor]:
        return [kv.clone() for kv in self.kv_cache]


class Pair:
    """Two ranks. Rank 1 is called at once, in this thread."""

    def __init__(self, folder: Path, stages: tuple[Stage, Stage] = (Stage(), Stage())) -> None:
        (folder / "config.json").write_text("{}")
        self.path = folder / "cache"
        self.ranks = [Rank(index, stage) for index, stage in enumerate(stages)]
        self.answers = Answers(Losses(lambda reason: None))
        self.is_called = True  # rank 1; or its calls are lost
        self.max_bytes = ALIGNMENT + NUM_BLOCKS * SLOT_BYTES

    def open(self) -> BlockFile | None:
        """The files, closed before if they are open."""
        self.close()
        options = BlockFileOptions(self.path, self.path.parent, {"dtype": "float32"}, self.max_bytes, 0)
        followers = Followers(0, self.call, [self.answers])
        for rank, peers in ((self.ranks[1], Leader(self)), (self.ranks[0], followers)):  # type: ignore[arg-type]
            own = of_rank(options, rank.index, f"{rank.index} of 2", options.folder)
            rank.file = open_block_file(own, rank.copier, peers, rank.io)
        return self.ranks[0].file

    def close(self) -> None:
        if self.ranks[0].file is not None:
            self.ranks[0].file.close()
            self.ranks[0].file = None

    def send_bytes(self, data: bytes) -> None:
        """Send as the connection of rank 1."""
        self.answers.put(json.loads(data))

    def call(self, call: FileCall) -> None:
        if self.is_called:
            getattr(self.ranks[1].file, call.method)(*call.arguments)
        else:
            self.answers.put([1])

    def save(self, blocks: list[tuple[int, int, Name, int]] = SAVES) -> None:
        """In pieces, as the store does."""
        file = self.ranks[0].file
        assert file is not None
        for block in blocks:
            assert file.can_save(10)
            file.save([block])

    def load(self) -> list[int]:
        file = self.open()
        assert file is not None
        return list(file.load(SLOTS, range(5), 10))

    def rank1(self) -> Path:
        return self.path.with_name("cache.rank1")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("stages", [(Stage(), Stage()), (Stage(1, 2), Stage(0, 2))], ids=["shards", "stages"])
def test_each_rank_gets_its_part_back(tmp_path: Path, stages: tuple[Stage, Stage]) -> None:
    pair = Pair(tmp_path, stages)
    pair.open()
    before = [rank.content() for rank in pair.ranks]
    pair.save()
    pair.close()
    for rank in pair.ranks:
        rank.forget()
    assert pair.load() == ALL
    for rank, was in zip(pair.ranks, before, strict=True):
        for kv, old in zip(rank.kv_cache, was, strict=True):
            assert kv[:, :5].equal(old[:, 1:6])
    pair.close()


def test_all_ranks_use_as_many_slots_as_the_largest_blocks_leave(tmp_path: Path) -> None:
    pair = Pair(tmp_path, (Stage(1, 2), Stage(0, 2)))  # of two layers, and of one
    file = pair.open()
    assert file is not None
    slots = [rank.file._file.num_slots for rank in pair.ranks if rank.file is not None]
    assert file.num_slots == slots[0] < slots[1]
    pair.close()


def absent(pair: Pair) -> None:
    pair.rank1().unlink()


def damaged(pair: Pair) -> None:
    data = bytearray(pair.rank1().read_bytes())
    for slot in range(NUM_BLOCKS):
        if len(data) > (at := ALIGNMENT + slot * SLOT_BYTES + 500):
            data[at] ^= 1
    pair.rank1().write_bytes(data)


def of_the_other_rank(pair: Pair) -> None:
    pair.rank1().write_bytes(pair.path.with_name("cache.rank0").read_bytes())


def of_one_rank(pair: Pair) -> None:
    """Settings that are the same but for the part of the model."""
    options = BlockFileOptions(pair.rank1(), pair.path.parent, {"dtype": "float32"}, pair.max_bytes, 0)
    rank, options = pair.ranks[1], replace(options, identity={"part of the model": "all"})
    file = open_block_file(options, rank.copier, Leader(pair), rank.io)  # type: ignore[arg-type]
    assert file is not None
    pair.answers.get()
    file.close()


@pytest.mark.parametrize("change", [absent, damaged, of_the_other_rank, of_one_rank])
def test_what_one_rank_does_not_have_is_not_there(pair: Pair, change: Callable[[Pair], None]) -> None:
    pair.open()
    pair.save()
    pair.close()
    change(pair)
    assert pair.load() == NONE
    pair.save()
    assert pair.load() == ALL, "saved again"


def test_a_block_of_which_one_rank_has_an_older_one(pair: Pair) -> None:
    """A process was killed between two ranks' writes."""
    pair.open()
    pair.save([(6, slot, (0, b"old" + bytes(29)), 0) for slot in range(NUM_BLOCKS)])
    pair.save(SAVES[:2])
    pair.is_called = False
    pair.save(SAVES[2:])
    pair.is_called = True
    assert pair.load() == [*ALL[:2], *NONE[2:]]


def test_slots_beyond_the_blocks_are_looked_at(pair: Pair) -> None:
    pair.open()
    pair.save(SAVES[:4])
    file = pair.open()
    assert file is not None
    assert file.load(SLOTS, [0], 10) == [Found.LOADED, *[Found.UNREAD] * 3, Found.INVALID]
    assert file.load(SLOTS, range(5), -1) == [*[Found.UNREAD] * 4, Found.INVALID], "no time is left"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_ends_the_saving_of_both(
    pair: Pair, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = pair.open()
    assert file is not None
    pair.save(SAVES[:2])
    write, full = os.pwritev, os.stat(f"{pair.path}.rank{rank}").st_ino

    def limited(fd: int, *arguments: Any) -> int:
        if os.fstat(fd).st_ino == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, *arguments)

    assert file.can_save(10)
    file._io.submit(int).result()
    monkeypatch.setattr(os, "pwritev", limited)
    pair.save(SAVES[2:])
    file._io.submit(int).result()
    assert file.has_failed
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"cache.rank{rank}: the prefix cache is not saved any more: No space left" in caplog.text
    monkeypatch.undo()
    assert pair.load() == [*ALL[:2], *NONE[2:]]


def test_a_file_that_one_rank_cannot_open(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.rank1().mkdir()
    assert pair.open() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cache.rank1: the prefix cache will not survive a restart" in caplog.text


def test_clear_empties_the_files_of_both(pair: Pair) -> None:
    file = pair.open()
    assert file is not None
    pair.save()
    file.clear()
    assert pair.load() == NONE
    assert [os.stat(f"{pair.path}.rank{rank}").st_size for rank in range(2)] == [ALIGNMENT] * 2
