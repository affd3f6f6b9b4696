"""The file in which KV blocks survive a restart: a header, and slots of one block each. Only bytes, of any value.

    header  4096 bytes: MAGIC, length and text of a JSON object that says what the blocks belong to, zeros
    slot    ENTRY: hash of the block's prefix, digest, heat, cache group; the block's content; zeros up to a multiple
            of 4096

The digest covers header, name and content. So a slot that was torn by a crash, damaged, or written for another model is
no block, and nothing else has to be written in order, synchronised or renamed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import Any

_log = logging.getLogger(__name__)

MAGIC = b"QuireKV\x01"
ALIGNMENT = 4096  # bytes; of header and slots
ENTRY = Struct("<32s32sQH6x")
HEAT = Struct("<Q")
HEAT_OFFSET = 64  # in ENTRY

Name = tuple[int, bytes]  # cache group, and the hash of the prefix that ends with the block


class CacheFileError(Exception):
    """The file cannot be used; the message, without the file's name, says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The block that a slot claims to hold; `CacheFile.read` verifies it."""

    slot: int
    name: Name
    heat: int  # the higher, the longer it should be kept
    digest: bytes


class CacheFile:
    """An open file, locked against other processes, readable by its owner only. Threads may call it at once."""

    def __init__(self, path: Path, identity: Mapping[str, str], block_bytes: int, max_bytes: int) -> None:
        """Opens or makes it. What was written for another `identity` or size of blocks is forgotten.

        Raises `CacheFileError`, and leaves the file as it is, when it is in use, is no such file or cannot be opened.
        """
        self.path, self.block_bytes = path, block_bytes
        self.slot_bytes = -(-(ENTRY.size + block_bytes) // ALIGNMENT) * ALIGNMENT
        self.num_slots = max(max_bytes - ALIGNMENT, 0) // self.slot_bytes
        header = _header({**identity, "block_bytes": str(block_bytes)})
        self._seal = sha256(header).digest()
        self._fd = _open(path)
        try:
            self._begin(header)
        except OSError as error:
            os.close(self._fd)
            raise CacheFileError(f"cannot be used ({error.strerror})") from None
        except CacheFileError:
            os.close(self._fd)
            raise

    def _begin(self, header: bytes) -> None:
        found = os.pread(self._fd, ALIGNMENT, 0)
        if found and not found.startswith(MAGIC):  # zeros, too: a disk image begins with them
            raise CacheFileError("is another kind of file, and stays as it is")
        os.fchmod(self._fd, 0o600)
        if found != header:
            if found:
                _log.info("%s: begins anew: %s", self.path, _differences(found, header))
            os.pwrite(self._fd, header, 0)  # in place: whenever this process dies, the file begins with MAGIC
            os.ftruncate(self._fd, ALIGNMENT)
            os.fsync(self._fd)
        elif os.fstat(self._fd).st_size > self._offset(self.num_slots):
            os.ftruncate(self._fd, self._offset(self.num_slots))

    def _offset(self, slot: int) -> int:
        return ALIGNMENT + slot * self.slot_bytes

    def entries(self) -> list[Entry]:
        """Return the blocks that the slots claim to hold, the hottest first; each name once."""
        num_slots = -((ALIGNMENT - os.fstat(self._fd).st_size) // self.slot_bytes)
        found = [entry for slot in range(num_slots) if (entry := self.entry(slot)) is not None]
        found.sort(key=lambda entry: entry.heat)
        return list({entry.name: entry for entry in found}.values())[::-1]

    def entry(self, slot: int) -> Entry | None:
        """Return the block that a slot claims to hold. None: nothing, or it cannot be read."""
        try:
            data = os.pread(self._fd, ENTRY.size, self._offset(slot))
        except OSError:
            return None
        if len(data) < ENTRY.size or not any(data):
            return None
        block_hash, digest, heat, group = ENTRY.unpack(data)
        return Entry(slot, (group, block_hash), heat, digest)

    def read(self, entry: Entry, content: Any) -> bool:
        """Fill a writable buffer of `block_bytes`. False when the slot does not hold what the entry says."""
        try:
            count = os.preadv(self._fd, [content], self._offset(entry.slot) + ENTRY.size)
        except OSError:
            return False
        return count == self.block_bytes and self._digest(entry.name, content) == entry.digest

    def write(self, slot: int, name: Name, heat: int, content: Any) -> None:
        """Put a buffer of `block_bytes` into a slot. OSError as when the disk is full: the slot is empty then."""
        assert slot < self.num_slots
        group, block_hash = name
        entry = ENTRY.pack(block_hash, self._digest(name, content), heat, group)
        if os.pwritev(self._fd, [entry, content], self._offset(slot)) != ENTRY.size + self.block_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def erase(self, slot: int) -> None:
        """Empty a slot."""
        os.pwrite(self._fd, bytes(ENTRY.size), self._offset(slot))

    def write_heat(self, slot: int, heat: int) -> None:
        os.pwrite(self._fd, HEAT.pack(heat), self._offset(slot) + HEAT_OFFSET)

    def clear(self) -> None:
        """Forget all blocks."""
        os.ftruncate(self._fd, ALIGNMENT)

    def close(self) -> None:
        os.close(self._fd)

    def _digest(self, name: Name, content: Any) -> bytes:
        group, block_hash = name
        digest = sha256(self._seal + group.to_bytes(2, "little") + block_hash)
        digest.update(content)
        return digest.digest()


def _open(path: Path) -> int:
    """A descriptor of a regular file that belongs to this user alone, locked."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise CacheFileError(f"cannot be opened ({error.strerror})") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CacheFileError("is no regular file")
        if found.st_uid != os.geteuid():  # who can write it could put words into prompts
            raise CacheFileError("belongs to another user")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except CacheFileError:
        os.close(fd)
        raise
    except OSError as error:
        os.close(fd)
        in_use = isinstance(error, BlockingIOError)
        raise CacheFileError(
            "is in use by another process" if in_use else f"cannot be used ({error.strerror})"
        ) from None
    return fd


def _header(identity: Mapping[str, str]) -> bytes:
    text = json.dumps(dict(sorted(identity.items()))).encode()
    header = MAGIC + len(text).to_bytes(4, "little") + text
    assert len(header) <= ALIGNMENT
    return header.ljust(ALIGNMENT, b"\0")


def _differences(found: bytes, wanted: bytes) -> str:
    """Return the differences between two headers, for the log."""
    theirs, ours = _identity(found), _identity(wanted)
    names = [name for name in ours if theirs.get(name) != ours[name]]
    return f"written for another {', '.join(names)}" if theirs else "its header is damaged"


def _identity(header: bytes) -> dict[str, Any]:
    start = len(MAGIC) + 4
    try:
        found = json.loads(header[start : start + int.from_bytes(header[len(MAGIC) : start], "little")])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
