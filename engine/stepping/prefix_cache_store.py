"""The prefix cache survives the engine: its blocks are kept in a file, and found there by the next engine."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path

from engine.config import EngineConfig
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.saved_blocks import Save, SavedBlocks
from engine.version import __version__
from engine.worker.block_store.block_file import BlockFile, BlockFileOptions, Found
from engine.worker.options import RunnerOptions

_log = logging.getLogger(__name__)

LOAD_SECONDS = 5.0  # longest delay of the start for loading the file
IDLE_SECONDS = 1.0  # without new blocks, after which they are saved
CLOSE_SECONDS = 5.0  # time allowed for saving the remaining blocks at shutdown
MAX_LOOKED_AT = 1000  # blocks at a time, and
BUFFER_BYTES = 8 << 20  # copied at a time: a request that arrives meanwhile waits a millisecond or two


class PrefixCacheStore:
    """Fills a pool's empty blocks from a file, and saves the blocks published in it since, in pieces.

    `load` first, then `idle` whenever there is no work, and `close`.
    """

    def __init__(self, file: BlockFile, pool: BlockPool, clock: Callable[[], float] = time.monotonic) -> None:
        """Owns the file."""
        self._file, self._pool, self._clock = file, pool, clock
        self._saved = SavedBlocks(file.num_slots)
        self._sweep: Iterator[Save | None] = iter(())  # over the published blocks
        self._num_seen = self._num_swept = pool.num_publications  # when last called; when the last sweep began
        self._quiet_since = clock()

    def load(self, seconds: float) -> int:
        """Fill empty blocks, the hottest first, for at most `seconds`. Returns how many. Forgets slots that are not
        valid.
        """
        entries = [entry for entry in self._file.entries() if entry.name[0] < self._pool.num_groups]
        block_ids = self._pool.free_and_empty()
        found = self._file.load([(entry.slot, entry.name) for entry in entries], block_ids, seconds)
        loaded = [
            (block_id, entry.name)
            for block_id, entry, each in zip(block_ids, entries, found, strict=False)
            if each == Found.LOADED
        ]
        self._pool.restore(loaded)
        self._saved = SavedBlocks(
            self._file.num_slots,
            (
                (entry.name, entry.slot, entry.heat)
                for entry, each in zip(entries, found, strict=True)
                if each != Found.INVALID
            ),
        )
        self._num_seen = self._num_swept = self._pool.num_publications
        return len(loaded)

    def idle(self) -> bool:
        """There is no work: save some blocks, if any are new. True when more can be saved soon."""
        now, num_publications = self._clock(), self._pool.num_publications
        if num_publications != self._num_seen:
            self._num_seen, self._quiet_since = num_publications, now
        if self._file.has_failed or now < self._quiet_since + IDLE_SECONDS:
            return False
        if self._num_swept != num_publications:
            self._begin_sweep()
        return self._save_some(0)

    def _begin_sweep(self) -> None:
        self._num_swept = self._pool.num_publications
        self._sweep = self._saved.sweep(self._pool.published())

    def _save_some(self, wait: float) -> bool:
        """Save up to a buffer full of blocks. Waits for so many seconds for a buffer. False: the sweep is over."""
        if not self._file.can_save(wait):
            return True
        num_seen, saves = 0, list[Save]()
        for save in islice(self._sweep, MAX_LOOKED_AT):
            num_seen += 1
            if save is not None:
                saves.append(save)
                if len(saves) == self._file.max_blocks:
                    break
        if saves:
            self._file.save([(save.block_id, save.slot, save.name, save.heat) for save in saves])
        return num_seen > 0

    def clear(self) -> None:
        """The pool was emptied: so is the file."""
        self._sweep = iter(())
        self._saved = SavedBlocks(self._file.num_slots)
        self._file.clear()

    def close(self, save: bool) -> None:
        """Save the remaining blocks, the hottest first, for at most `CLOSE_SECONDS`. `save=False`: the content is in
        doubt.
        """
        if not save or self._file.has_failed:
            self._file.close()
            return
        deadline = self._clock() + CLOSE_SECONDS
        self._begin_sweep()
        while not self._file.has_failed and (left := deadline - self._clock()) > 0 and self._save_some(left):
            pass
        self._file.close(self._saved.heats())


OpenBlockFile = Callable[[BlockFileOptions], BlockFile | None]


def open_store(
    config: EngineConfig, folder: Path, options: RunnerOptions, open_file: OpenBlockFile, pool: BlockPool
) -> PrefixCacheStore | None:
    """Open the store of `config.prefix_cache_file` and load its blocks. None, with a warning, if it cannot be used."""
    assert config.prefix_cache_file is not None
    path, start = Path(config.prefix_cache_file).expanduser().absolute(), time.monotonic()
    identity = {
        "hf_overrides": sha256(json.dumps(config.hf_overrides, sort_keys=True).encode()).hexdigest(),
        "seed": str(config.seed) if config.load_format == "dummy" or config.calculate_kv_scales else "",
        "dtype": f"{options.dtype}, {options.kv_dtype}, scales calculated: {options.calculate_kv_scales}",
        "quantization": str(config.quantization),
        "max_model_len": str(options.max_model_len),
        "part of the model": "all",
        "kind of device": options.device.torch_device.type,
        "version of Quire": __version__,
    }
    file = open_file(BlockFileOptions(path, folder, identity, config.prefix_cache_file_size, BUFFER_BYTES))
    if file is None:
        return None
    store = PrefixCacheStore(file, pool)
    num_blocks = store.load(LOAD_SECONDS)
    _log.info("%s: %d blocks of the prefix cache in %.1f s", path, num_blocks, time.monotonic() - start)
    return store
