"""The prefix cache's file: what was written is found, and whatever else its bytes are, no wrong block and no error."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.worker.block_store.cache_file import ALIGNMENT, ENTRY, MAGIC, CacheFile, CacheFileError, Name

SIZE = 5000  # bytes of a block: a slot takes 8192
STRIDE = 8192
IDENTITY = {"model": "a", "dtype": "float32"}


def name(i: int) -> Name:
    return i % 2, bytes([i]) * 32


def content(i: int) -> bytes:
    return random.Random(i).randbytes(SIZE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.kv"


@pytest.fixture
def open_file(path: Path) -> Iterator[Callable[..., CacheFile]]:
    """A new opening of the file; the one before is closed."""
    opened: list[CacheFile] = []

    def open_again(identity: dict[str, str] = IDENTITY, block_bytes: int = SIZE, num_slots: int = 8) -> CacheFile:
        while opened:
            opened.pop().close()
        opened.append(CacheFile(path, identity, block_bytes, ALIGNMENT + num_slots * STRIDE))
        return opened[-1]

    yield open_again
    while opened:
        opened.pop().close()


def valid(file: CacheFile) -> dict[Name, bytes]:
    """Slots that are read without complaint, the hottest first."""
    found = {}
    for entry in file.entries():
        buffer = bytearray(file.block_bytes)
        if file.read(entry, buffer):
            found[entry.name] = bytes(buffer)
    return found


def fill(file: CacheFile, slots: int) -> None:
    for i in range(slots):
        file.write(i, name(i), 100 + (i * 3) % 5, content(i))


def test_blocks_are_found_again_the_hottest_first(open_file: Callable[..., CacheFile]) -> None:
    fill(open_file(), 5)
    found = valid(open_file())
    assert found == {name(i): content(i) for i in range(5)}
    assert list(found) == [name(i) for i in (3, 1, 4, 2, 0)]


def test_a_slot_is_written_again_and_warmed(open_file: Callable[..., CacheFile]) -> None:
    file = open_file()
    fill(file, 3)
    file.write(1, name(9), 50, content(9))
    file.write_heat(0, 1000)
    assert list(valid(open_file())) == [name(0), name(2), name(9)]


def test_a_name_in_two_slots_counts_once(open_file: Callable[..., CacheFile]) -> None:
    file = open_file()
    file.write(0, name(1), 5, content(1))
    file.write(1, name(1), 6, content(1))
    assert [(entry.slot, entry.heat) for entry in file.entries()] == [(1, 6)]


def test_only_its_owner_can_read_it(path: Path, open_file: Callable[..., CacheFile]) -> None:
    open_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    open_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_was_written_for_others_is_forgotten(
    open_file: Callable[..., CacheFile], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for other, says in (({**IDENTITY, "model": "b"}, "another model"), ({"dtype": "x"}, "another dtype")):
        fill(open_file(), 3)
        caplog.clear()
        assert valid(open_file(other)) == {}
        [record] = caplog.records
        assert says in record.message
    fill(open_file(), 3)
    caplog.clear()
    assert valid(open_file(block_bytes=SIZE - 1)) == {}
    assert "another block_bytes" in caplog.text


def test_a_slot_of_another_model_is_no_block(path: Path, open_file: Callable[..., CacheFile]) -> None:
    """Its digest covers what the file belongs to."""
    fill(open_file(), 2)
    theirs = path.read_bytes()[ALIGNMENT:]
    open_file({**IDENTITY, "model": "b"})
    with path.open("r+b") as raw:
        raw.seek(ALIGNMENT)
        raw.write(theirs)
    file = open_file({**IDENTITY, "model": "b"})
    assert len(file.entries()) == 2
    assert valid(file) == {}


def test_its_size_is_bounded_and_can_be_lowered(path: Path, open_file: Callable[..., CacheFile]) -> None:
    file = open_file()
    assert file.num_slots == 8
    fill(file, 8)
    assert path.stat().st_size <= ALIGNMENT + 8 * STRIDE
    assert set(valid(open_file(num_slots=3))) == {name(i) for i in range(3)}
    assert path.stat().st_size <= ALIGNMENT + 3 * STRIDE
    assert open_file(num_slots=0).entries() == []


def test_it_is_emptied(open_file: Callable[..., CacheFile]) -> None:
    file = open_file()
    fill(file, 3)
    file.clear()
    assert valid(open_file()) == {}
    fill(open_file(), 1)
    assert len(valid(open_file())) == 1


@pytest.mark.parametrize(
    "text", [b"export PATH=/bin\n", b"QuireKV", b"x" * 10_000, bytes(8), bytes(446) + b"disk image", bytes(1 << 16)]
)
def test_another_kind_of_file_stays_as_it_is(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    path.chmod(0o644)
    with pytest.raises(CacheFileError, match="is another kind of file"):
        CacheFile(path, IDENTITY, SIZE, 1 << 20)
    assert path.read_bytes() == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "fsync"])
def test_a_process_that_dies_while_it_begins_anew_leaves_its_own_file(
    path: Path, open_file: Callable[..., CacheFile], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = CacheFile(path, IDENTITY, SIZE, 1 << 20)
    fill(file, 3)
    file.close()

    def dies(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, dies)
    with pytest.raises(CacheFileError, match="cannot be used"):
        CacheFile(path, {**IDENTITY, "model": "b"}, SIZE, 1 << 20)
    monkeypatch.undo()
    assert path.read_bytes().startswith(MAGIC)
    assert valid(open_file({**IDENTITY, "model": "b"})) == {}


def test_files_that_cannot_be_used_are_named(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(where: Path, match: str) -> None:
        with pytest.raises(CacheFileError, match=match):
            CacheFile(where, IDENTITY, SIZE, 1 << 20)

    refused(tmp_path, "cannot be opened")
    refused(tmp_path / "nowhere" / "file", "cannot be opened")
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "is no regular file")
    file = CacheFile(path, IDENTITY, SIZE, 1 << 20)
    refused(path, "is in use by another process")
    file.close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused(path, "belongs to another user")
    monkeypatch.undo()
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    path.write_bytes(b"")
    refused(path, "cannot be used .No space left on device")
    monkeypatch.undo()
    CacheFile(path, IDENTITY, SIZE, 1 << 20).close()  # none of these holds the lock


def test_a_torn_write_costs_one_block(path: Path, open_file: Callable[..., CacheFile]) -> None:
    """The process dies when any number of a slot's bytes have been replaced."""
    fill(open_file(), 3)
    before = path.read_bytes()
    open_file().write(1, name(9), 999, content(9))
    after = path.read_bytes()
    start = ALIGNMENT + STRIDE
    for cut in (1, 31, 32, 64, 70, 79, ENTRY.size, ENTRY.size + 1, 4096, ENTRY.size + SIZE - 1):
        path.write_bytes(after[: start + cut] + before[start + cut :])
        found = valid(open_file())
        assert found == {name(i): content(i) for i in (0, 2)} | found
        assert set(found) - {name(0), name(2)} <= {name(1)}, "only the heat was replaced"
        path.write_bytes(before[:start] + after[start : start + cut])  # the file had ended there
        assert valid(open_file()) == {name(0): content(0)}


def test_a_full_disk_is_an_oserror_and_no_block(
    open_file: Callable[..., CacheFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_file()
    fill(file, 2)
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real(fd, [parts[0], parts[1][:100]], at))
    with pytest.raises(OSError, match="No space left"):
        file.write(0, name(9), 999, content(9))
    monkeypatch.undo()
    assert valid(open_file()) == {name(1): content(1)}


@pytest.mark.parametrize("seed", range(4))
def test_any_bytes_are_read_without_a_wrong_block(path: Path, seed: int, open_file: Callable[..., CacheFile]) -> None:
    rng = random.Random(seed)
    fill(open_file(), 6)
    written = {name(i): content(i) for i in range(6)}
    whole = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3, 30])):
            start = rng.choice([rng.randrange(200), ALIGNMENT + rng.randrange(6) * STRIDE, rng.randrange(len(whole))])
            start += rng.randrange(ENTRY.size)
            piece = rng.randbytes(rng.choice([1, 8, 500]))
            match rng.randrange(4):
                case 0:
                    damaged[start : start + len(piece)] = piece
                case 1:
                    damaged[start : start + len(piece)] = bytes(len(piece))
                case 2:
                    damaged[start:start] = piece
                case 3:
                    del damaged[start:]
        path.write_bytes(damaged)
        with contextlib.suppress(CacheFileError):  # another kind of file
            assert valid(open_file()).items() <= written.items()
