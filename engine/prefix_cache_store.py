"""The prefix cache survives the engine: its blocks are kept in a file, and found there by the next engine."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue

from torch import Tensor

from engine import __version__
from engine.cache_file import CacheFile, CacheFileError, Entry, Name
from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.saved_blocks import Save, SavedBlocks
from engine.models.fingerprint import fingerprint
from engine.worker.block_copier import BlockCopier
from engine.worker.device import Event
from engine.worker.options import RunnerOptions

_log = logging.getLogger(__name__)

LOAD_SECONDS = 5.0  # that the start may take longer for the file
IDLE_SECONDS = 1.0  # without new blocks, after which they are saved
CLOSE_SECONDS = 5.0  # for what is not saved yet when the engine stops
NUM_BUFFERS = 4  # as many threads read at the start; one writes
MAX_LOOKED_AT = 1000  # blocks at a time, and
BUFFER_BYTES = 8 << 20  # copied at a time: a request that comes meanwhile waits a millisecond or two


class PrefixCacheStore:
    """Fills a pool's empty blocks from a file, and saves what is published in it since, in pieces and in another thread.

    `load` first, then `idle` whenever there is no work, and `close`.
    """

    def __init__(
        self, file: CacheFile, copier: BlockCopier, pool: BlockPool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Owns the file."""
        self._file, self._copier, self._pool, self._clock = file, copier, pool, clock
        self._saved = SavedBlocks(file.num_slots)
        self._io = ThreadPoolExecutor(1, "prefix cache file")
        self._buffers: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(NUM_BUFFERS):
            self._buffers.put(copier.new_buffer())
        self._sweep: Iterator[Save | None] = iter(())  # over what is published
        self._num_seen = self._num_swept = pool.num_publications  # when last called; when the last sweep began
        self._quiet_since = clock()
        self._failed = False  # the file cannot be written any more

    def load(self, seconds: float) -> int:
        """Fill empty blocks, the hottest first, for at most so long; returns how many. What is not valid is forgotten."""
        deadline = self._clock() + seconds
        entries = [entry for entry in self._file.entries() if entry.name[0] < self._pool.num_groups]
        block_ids = self._pool.free_and_empty()
        loaded: list[tuple[int, Name]] = []
        invalid: set[int] = set()  # slots
        pending: deque[Future[tuple[Sequence[Entry], list[bool], Tensor]]] = deque()

        def take() -> None:
            part, valid, buffer = pending.popleft().result()
            names = [entry.name for entry, is_valid in zip(part, valid, strict=True) if is_valid]
            invalid.update(entry.slot for entry, is_valid in zip(part, valid, strict=True) if not is_valid)
            ids = block_ids[len(loaded) : len(loaded) + len(names)]
            if ids:
                self._copier.write(buffer, ids).synchronize()
            loaded.extend(zip(ids, names, strict=True))
            self._buffers.put(buffer)

        size = self._copier.max_blocks
        with ThreadPoolExecutor(NUM_BUFFERS, "prefix cache file") as threads:
            for start in range(0, min(len(entries), len(block_ids)), size):
                if len(pending) == NUM_BUFFERS:
                    take()
                if self._clock() > deadline:
                    break
                part = entries[start : min(start + size, len(block_ids))]
                pending.append(threads.submit(self._read, part, self._buffers.get()))
            while pending:
                take()
        self._pool.restore(loaded)
        self._saved = SavedBlocks(
            self._file.num_slots,
            ((entry.name, entry.slot, entry.heat) for entry in entries if entry.slot not in invalid),
        )
        self._num_seen = self._num_swept = self._pool.num_publications
        return len(loaded)

    def _read(self, part: Sequence[Entry], buffer: Tensor) -> tuple[Sequence[Entry], list[bool], Tensor]:
        """Fill the buffer's first rows with those entries that are valid."""
        rows, row, valid = buffer.numpy(), 0, []
        for entry in part:
            valid.append(self._file.read(entry, rows[row]))
            row += valid[-1]
        return part, valid, buffer

    def idle(self) -> bool:
        """There is no work: save some blocks, if any are new. True when more can be saved soon."""
        now, num_publications = self._clock(), self._pool.num_publications
        if num_publications != self._num_seen:
            self._num_seen, self._quiet_since = num_publications, now
        if self._failed or now < self._quiet_since + IDLE_SECONDS:
            return False
        if self._num_swept != num_publications:
            self._begin_sweep()
        return self._save_some(0)

    def _begin_sweep(self) -> None:
        self._num_swept = self._pool.num_publications
        self._sweep = self._saved.sweep(self._pool.published())

    def _save_some(self, wait: float) -> bool:
        """Save up to a buffer full of blocks. Waits for so many seconds for a buffer. False: the sweep is over."""
        try:
            buffer = self._buffers.get(timeout=wait)
        except Empty:
            return True
        num_seen, saves = 0, list[Save]()
        for save in islice(self._sweep, MAX_LOOKED_AT):
            num_seen += 1
            if save is not None:
                saves.append(save)
                if len(saves) == self._copier.max_blocks:
                    break
        if saves:
            event = self._copier.read([save.block_id for save in saves], buffer)
            self._io.submit(self._write, saves, buffer, event)
        else:
            self._buffers.put(buffer)
        return num_seen > 0

    def _write(self, saves: Sequence[Save], buffer: Tensor, event: Event) -> None:
        try:
            event.synchronize()
            for row, save in enumerate(saves):
                if not self._failed:
                    self._file.write(save.slot, save.name, save.heat, buffer[row].numpy())
        except OSError as error:
            self._fail(error)
        finally:
            self._buffers.put(buffer)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            _log.warning("%s: the prefix cache is not saved any more: %s", self._file.path, error.strerror)

    def clear(self) -> None:
        """The pool was emptied: so is the file."""
        self._sweep = iter(())
        self._saved = SavedBlocks(self._file.num_slots)
        self._io.submit(self._clear).result()

    def _clear(self) -> None:
        try:
            self._file.clear()
        except OSError as error:
            self._fail(error)

    def close(self, save: bool) -> None:
        """Save what is not saved yet, the hottest first, for at most `CLOSE_SECONDS`. `save=False`: the content is in doubt."""
        if save and not self._failed:
            deadline = self._clock() + CLOSE_SECONDS
            self._begin_sweep()
            while not self._failed and (left := deadline - self._clock()) > 0 and self._save_some(left):
                pass
            self._io.submit(self._write_heats)
        self._io.shutdown()
        self._file.close()

    def _write_heats(self) -> None:
        try:
            for slot, heat in self._saved.heats():
                if not self._failed:
                    self._file.write_heat(slot, heat)
        except OSError as error:
            self._fail(error)


def open_store(
    config: EngineConfig, folder: Path, options: RunnerOptions, copier: BlockCopier, pool: BlockPool
) -> PrefixCacheStore | None:
    """The store of `config.prefix_cache_file`, its blocks loaded. None, and a warning, when the file cannot be used."""
    assert config.prefix_cache_file is not None
    path, start = Path(config.prefix_cache_file).expanduser(), time.monotonic()
    identity = {
        "model": fingerprint(folder, config.hf_overrides),
        "seed": str(config.seed) if config.load_format == "dummy" or config.calculate_kv_scales else "",
        "dtype": f"{options.dtype}, {options.kv_dtype}, scales calculated: {options.calculate_kv_scales}",
        "quantization": str(config.quantization),
        "layout of the KV cache": sha256(repr(copier.layout).encode()).hexdigest(),
        "max_model_len": str(options.max_model_len),
        "kind of device": options.device.torch_device.type,
        "version of Quire": __version__,
    }
    try:
        file = CacheFile(path, identity, copier.block_bytes, config.prefix_cache_file_size)
    except CacheFileError as error:
        _log.warning("%s: the prefix cache will not survive a restart: the file %s", path, error)
        return None
    store = PrefixCacheStore(file, copier, pool)
    num_blocks = store.load(LOAD_SECONDS)
    _log.info("%s: %d blocks of the prefix cache in %.1f s", path, num_blocks, time.monotonic() - start)
    return store
