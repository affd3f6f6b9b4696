"""The prefix cache survives the engine: its blocks are kept in files, and found there by the next engine."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Protocol

from engine.config import EngineConfig
from engine.core.kv.block_manager import BlockManager
from engine.core.kv.block_pool import BlockPool, Name
from engine.core.kv.saved_blocks import Save, SavedBlocks
from engine.core.tiers import HostTier
from engine.models.files import weights_fingerprint
from engine.version import __version__
from engine.worker.block_store.block_file import BlockFile, BlockFileOptions, Found
from engine.worker.options import RunnerOptions

_log = logging.getLogger(__name__)

LOAD_SECONDS = 5.0  # longest delay of the start for loading the file
IDLE_SECONDS = 1.0  # without new blocks, after which they are saved
CLOSE_SECONDS = 5.0  # time allowed for saving the remaining blocks at shutdown
MAX_LOOKED_AT = 1000  # blocks at a time, and
BUFFER_BYTES = 8 << 20  # copied at a time: a request that arrives meanwhile waits a millisecond or two
STEP_BYTES = 1 << 20  # of blocks saved before a step, at least one block
STEPS_LATER = 2  # a block is saved once the step that has filled it was read
MAX_UNSAVED = 1 << 16  # blocks that wait to be saved: the oldest ones are left out
RETRY_SECONDS = 60.0  # after a failure, as of a full disk
WAIT_SECONDS = 1.0


class PrefixCacheStore:
    """Fills a pool's empty blocks from a file, and saves the blocks published in it since, in pieces.

    `load` first, then `step` before each step, `idle` whenever there is no work, and `close`.

    With a `HostTier`, the file is the tier below it: blocks are saved while requests run, too, from host memory if that
    keeps what the pool evicts, and read when a request has their prefix. Without one, as with several ranks, blocks are
    saved only when there is no work, and read only at the start.
    """

    def __init__(
        self,
        file: BlockFile,
        pool: BlockPool,
        clock: Callable[[], float] = time.monotonic,
        tier: HostTier | None = None,
        in_host: bool = False,
        number: int = 0,
    ) -> None:
        """Owns the file. `in_host`: the tier has slots in host memory, from which blocks are saved. `number`: of
        the pool in the tier.
        """
        self._file, self._pool, self._clock, self._tier, self._in_host = file, pool, clock, tier, in_host
        self._number = number
        self._use(SavedBlocks(file.num_slots))
        self._sweep: Iterator[Save | None] = iter(())  # over the published blocks
        self._num_seen = self._num_swept = pool.num_publications  # when last called; when the last sweep began
        self._quiet_since = self._failed_at = clock()
        self._num_steps = 0
        # The number of the step before which a block was published, or kept in host memory; its name and id.
        self._unsaved: deque[tuple[int, Name, int]] = deque(maxlen=MAX_UNSAVED)
        if tier is not None and in_host:
            tier.on_keep[number] = lambda name: self._unsaved.append((self._num_steps, name, -1))
        elif tier is not None:
            pool.on_publish = lambda name, block_id: self._unsaved.append((self._num_steps, name, block_id))

    def _use(self, saved: SavedBlocks) -> None:
        self._saved = saved
        if self._tier is not None:
            self._tier.saved[self._number] = saved

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
        kept = (
            (entry.name, entry.slot, entry.heat)
            for entry, each in zip(entries, found, strict=True)
            if each != Found.INVALID
        )
        self._use(SavedBlocks(self._file.num_slots, kept))
        self._num_seen = self._num_swept = self._pool.num_publications
        return len(loaded)

    def step(self) -> None:
        """Do what is due between two steps: record what was written and read, and save a few blocks."""
        if self._tier is None:
            return
        self._num_steps += 1
        self._record_reads()
        self._record_saves()
        if self._file.has_failed and self._clock() >= self._failed_at + RETRY_SECONDS:
            self._file.retry()
        if not self._file.has_failed and self._unsaved and self._file.num_slots and self._file.can_save():
            self._save_unsaved(min(max(STEP_BYTES // self._file.block_bytes, 1), self._file.max_blocks))

    def begin_reads(self) -> None:
        """Begin to read what the planned step's loads need. Call it once that step is launched."""
        if self._tier is not None:
            for load in self._tier.take_file_loads(self._number):
                self._file.reads.begin(load.number, load.blocks)

    def wait(self) -> None:
        """Wait until something was read."""
        self._file.reads.wait(WAIT_SECONDS)

    def _record_saves(self) -> None:
        """Record what was written since the last call, and empty the slots of blocks that were forgotten."""
        tier, saved = self._tier, self._saved
        assert tier is not None
        for save in self._file.ended_saves():
            if save.host_slot is not None:
                tier.unpin(save.name, save.host_slot)
            if save.is_there:
                saved.written(save.name, save.slot)
            elif saved.is_at(save.name, save.slot):
                saved.forget(save.name)
                self._failed_at = self._clock()
        if saved.to_erase:
            self._file.erase(saved.to_erase)
            saved.to_erase = []

    def _record_reads(self) -> None:
        """Record what was read since the last call. Blocks that turn out to be damaged are forgotten."""
        tier, saved = self._tier, self._saved
        assert tier is not None
        for number, failed in self._file.reads.finished(tier.is_loading):
            damaged = [name for slot, name in failed if saved.is_at(name, slot)]  # else it has given way meanwhile
            for name in damaged:
                saved.forget(name)
            tier.read(number, {name for _, name in failed})
            tier.num_damaged += len(damaged)
            if damaged:
                _log.warning("%s: %d damaged blocks are dropped", self._file.path, len(damaged))

    def _save_unsaved(self, most: int) -> None:
        """Save up to so many of the blocks that wait for it."""
        tier, saves = self._tier, list[tuple[int, int, Name, int]]()
        assert tier is not None
        while self._unsaved and len(saves) < most and self._unsaved[0][0] <= self._num_steps - STEPS_LATER:
            _, name, block_id = self._unsaved.popleft()
            if self._saved.has_slot(name):
                continue
            if not self._in_host:
                place = block_id if self._pool.name_of(block_id) == name else None
            else:
                place = tier.pin(name)
            if place is None:  # it was evicted
                continue
            save = self._saved.assign(place, name)
            saves.append((save.block_id, save.slot, name, save.heat))
        if saves:
            (self._file.save_from_host if self._in_host else self._file.save)(saves)

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
        self._unsaved.clear()
        self._use(SavedBlocks(self._file.num_slots))
        self._file.clear()

    def close(self, save: bool) -> None:
        """Save the remaining blocks, the hottest first, for at most `CLOSE_SECONDS`. `save=False`: the content is in
        doubt.
        """
        self._pool.on_publish = None
        if self._tier is not None:
            self._record_saves()
        if not save or self._file.has_failed:
            self._end()
            return
        deadline = self._clock() + CLOSE_SECONDS
        self._begin_sweep()
        while not self._file.has_failed and (left := deadline - self._clock()) > 0 and self._save_some(left):
            pass
        self._end(self._saved.heats())

    def _end(self, heats: Iterable[tuple[int, int]] = ()) -> None:
        self._file.close(heats)
        if (tier := self._tier) is not None:
            for save in self._file.ended_saves():
                if save.host_slot is not None:
                    tier.unpin(save.name, save.host_slot)
            tier.on_keep[self._number] = tier.saved[self._number] = None


class Store(Protocol):
    """See `PrefixCacheStore`."""

    def step(self) -> None: ...

    def begin_reads(self) -> None: ...

    def wait(self) -> None: ...

    def idle(self) -> bool: ...

    def clear(self) -> None: ...

    def close(self, save: bool) -> None: ...


class StoreOfPools:
    """One store for the blocks of each pool."""

    def __init__(self, stores: Sequence[PrefixCacheStore]) -> None:
        self._stores = stores

    def step(self) -> None:
        """See `PrefixCacheStore.step`."""
        for store in self._stores:
            store.step()

    def begin_reads(self) -> None:
        """See `PrefixCacheStore.begin_reads`."""
        for store in self._stores:
            store.begin_reads()

    def wait(self) -> None:
        """See `PrefixCacheStore.wait`. A store that reads nothing does not wait."""
        for store in self._stores:
            store.wait()

    def idle(self) -> bool:
        """See `PrefixCacheStore.idle`. States, which are few and large, after all KV blocks."""
        return any(store.idle() for store in self._stores)

    def clear(self) -> None:
        """See `PrefixCacheStore.clear`."""
        for store in self._stores:
            store.clear()

    def close(self, save: bool) -> None:
        """See `PrefixCacheStore.close`."""
        for store in self._stores:
            store.close(save)


OpenBlockFile = Callable[[BlockFileOptions], BlockFile | None]


def open_store(
    config: EngineConfig, folder: Path, options: RunnerOptions, open_file: OpenBlockFile, blocks: BlockManager
) -> Store | None:
    """Open the store of `config.prefix_cache_file` and load its blocks. None, with a warning, if it cannot be used.

    States of recurrent layers are in a file beside it, FILE.states. Each has half of the size then.
    """
    assert config.prefix_cache_file is not None
    path = Path(config.prefix_cache_file).expanduser().absolute()
    identity = _identity(config, options)
    paths = [path, path.with_name(f"{path.name}.states")]
    pools, stores = blocks.pools.pools, list[PrefixCacheStore]()
    for i, pool in enumerate(pools):
        size = config.prefix_cache_file_size // len(pools)
        file = open_file(BlockFileOptions(paths[i], folder, identity, size, BUFFER_BYTES, i))
        if file is None:
            for other in stores:
                other.close(save=False)
            return None
        tier = blocks.tier if config.num_ranks == 1 else None
        stores.append(PrefixCacheStore(file, pool, tier=tier, in_host=options.host_cache_bytes > 0, number=i))
        start = time.monotonic()
        num_blocks = stores[-1].load(LOAD_SECONDS)
        _log.info("%s: %d blocks of the prefix cache in %.1f s", paths[i], num_blocks, time.monotonic() - start)
    return stores[0] if len(stores) == 1 else StoreOfPools(stores)


def _identity(config: EngineConfig, options: RunnerOptions) -> dict[str, str]:
    """Return the settings that blocks depend on."""
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
    if options.weight_overlays:
        overlays = [weights_fingerprint(Path(each)) for each in options.weight_overlays]
        identity["weight overlays"] = sha256(json.dumps(overlays).encode()).hexdigest()
    return identity
