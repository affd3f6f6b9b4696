"""Records traffic for `quire bench serve --replay`: arrival times, lengths, and which prompts share prefixes.

Writes one JSON line per answer, in Mooncake's published format with additional members. It contains no text, token, id
or name: a block of prompt tokens appears as a hash of all tokens up to its end, with a key that exists only in memory.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import stat
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TextIO

from engine import ConfigError
from server.metrics import SampleWatch

_log = logging.getLogger(__name__)
MAX_WAITING = 10_000  # finished requests that are not written yet
ID_BYTES = 6  # size of a block's number: exact in every JSON parser
TAIL_BYTES = 1 << 20  # longest expected line
# Of every line: a file whose last line has others is not continued.
MEMBERS = {"timestamp", "input_length", "output_length", "hash_ids", "block_size", "max_tokens", "finish_reason"}


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished request."""

    received: float  # monotonic seconds
    cache_salt: str
    prompts: list[list[int]]
    samples: Sequence[SampleWatch]  # the same number for each prompt, in the order of the prompts


class TrafficRecorder:
    """Appends to a file in a separate thread. An existing file is continued with later times and different block
    numbers.
    """

    def __init__(self, path: Path, block_size: int) -> None:
        """Open the file, readable only by its owner. Raises `ConfigError` if it cannot be written."""
        self._path, self._block_size, self._key = path, block_size, secrets.token_bytes(32)
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"record_trace {path}: {error.strerror or error}") from None
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        try:
            before = _last_timestamp(descriptor, path)
        except ConfigError:
            self._file.close()
            raise
        self._start = time.monotonic() - before / 1e3
        self._waiting: queue.Queue[Ended | None] = queue.Queue(MAX_WAITING)
        self._failed = False  # if True, recording has stopped
        self._thread = threading.Thread(target=self._run, name="traffic recorder", daemon=True)
        self._thread.start()

    def add(self, ended: Ended) -> None:
        try:
            self._waiting.put_nowait(ended)
        except queue.Full:
            self._fail("the disk is too slow")

    def close(self) -> None:
        """Write all pending lines."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._file as file:
            while (ended := self._waiting.get()) is not None:
                try:
                    if not self._failed:
                        self._write(file, ended)
                    if self._waiting.empty():
                        file.flush()
                except OSError as error:
                    self._fail(error.strerror)

    def _fail(self, reason: str | None) -> None:
        if not self._failed:
            self._failed = True
            _log.warning("%s: traffic is not recorded any more: %s", self._path, reason)

    def _write(self, file: TextIO, ended: Ended) -> None:
        each = len(ended.samples) // len(ended.prompts)
        for index, prompt in enumerate(ended.prompts):
            hash_ids = self._hash_ids(prompt, ended.cache_salt)
            for sample in ended.samples[index * each : (index + 1) * each]:
                line = {
                    "timestamp": max(round((ended.received - self._start) * 1e3), 0),
                    "input_length": len(prompt),
                    "output_length": sample.num_tokens,
                    "hash_ids": hash_ids,
                    "block_size": self._block_size,
                    "max_tokens": sample.max_tokens,
                    "finish_reason": sample.finish_reason,
                }
                file.write(json.dumps(line) + "\n")

    def _hash_ids(self, prompt: list[int], cache_salt: str) -> list[int]:
        """Return a number for each full block, equal for prompts with the same salt and the same tokens up to the
        block's end.
        """
        chain, numbers = blake2b(cache_salt.encode(), key=self._key).digest(), []
        for end in range(self._block_size, len(prompt) + 1, self._block_size):
            tokens = array("q", prompt[end - self._block_size : end]).tobytes()
            chain = blake2b(chain + tokens, key=self._key).digest()
            numbers.append(int.from_bytes(chain[:ID_BYTES], "little"))
        return numbers


def _last_timestamp(descriptor: int, path: Path) -> int:
    """Return the timestamp of a trace's last line in milliseconds; 0 if the file is empty."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"record_trace {path} is no regular file")
    if not found.st_size:
        return 0
    lines = os.pread(descriptor, TAIL_BYTES, max(found.st_size - TAIL_BYTES, 0)).split(b"\n")
    try:
        last = json.loads(lines[-2])
        if lines[-1] or set(last) != MEMBERS:
            raise ValueError
        return int(last["timestamp"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ConfigError(f"record_trace {path} is no trace, and stays as it is") from None
