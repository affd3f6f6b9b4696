"""Sleep and new weights of all replicas, which take no requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from engine.errors import EngineAsleepError
from engine.replicas.dispatcher import Dispatcher
from engine.replicas.replica import Replica
from engine.replicas.weight_receiver import receive_into
from engine.setup.weight_source import TensorFolders, WeightSource, is_address


class Availability:
    """Changes all replicas alike, one change at a time. While they change, new requests are refused."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        dispatcher: Dispatcher,
        weights_path: str,
        check_alive: Callable[[], None],
        abort_all: Callable[[], None],
    ) -> None:
        """`check_alive`: raises `EngineDeadError` once the processes are lost for good."""
        self.weights_path, self.weights_version = weights_path, 0  # the version counts replacements
        self._source: WeightSource | None = None  # of the newest weights; None: they have not been replaced
        self._received = TensorFolders()
        self._replicas, self._dispatcher = replicas, dispatcher
        self._check_alive, self._abort_all = check_alive, abort_all
        self._lock, self._refuses, self._is_updating = asyncio.Lock(), False, False

    def check(self) -> None:
        """Raises `EngineDeadError`, or `EngineAsleepError` if no request is taken now."""
        self._check_alive()
        if self.refusal:
            raise EngineAsleepError(self.refusal)

    @property
    def refusal(self) -> str:
        """Why no request is taken now; "": they are, if the processes are alive."""
        if self._is_updating:
            return "the model's weights are being replaced"
        return "the model is asleep: POST /wake_up wakes it up" if self._refuses else ""

    @property
    def is_sleeping(self) -> bool:
        """See `AsyncEngine.is_sleeping`."""
        return self._refuses and not self._is_updating

    @property
    def sleep_level(self) -> int:
        """See `AsyncEngine.sleep_level`."""
        return min(replica.sleep_level for replica in self._replicas)

    async def sleep(self, level: int, *, abort: bool) -> None:
        """See `AsyncEngine.sleep`."""
        async with self._lock:
            if self.sleep_level:
                return
            self.check()
            self._refuses = True
            try:
                if abort:
                    self._abort_all()
                await asyncio.gather(*(replica.sleep(level) for replica in self._replicas))
            except BaseException:
                await self._wake_replicas()
                raise

    async def wake_up(self) -> None:
        """See `AsyncEngine.wake_up`."""
        async with self._lock:
            await self._wake_replicas()

    async def _wake_replicas(self) -> None:
        await asyncio.gather(*(replica.wake_up() for replica in self._replicas))
        self._refuses = False
        for replica in self._replicas:
            self._dispatcher.started(replica)  # with an empty cache

    async def update_weights(self, path: str, *, abort: bool) -> None:
        """See `AsyncEngine.update_weights`."""
        async with self._lock:
            self.check()
            folder = path
            try:
                if is_address(path):
                    folder = self._received.new()
                    await receive_into(folder, path)
                await self._replace_weights(folder, abort)
                self.weights_path, self.weights_version = path, self.weights_version + 1
            finally:
                self._received.keep(() if self._source is None else self._source.overlays)

    async def _replace_weights(self, folder: str, abort: bool) -> None:
        self._refuses = self._is_updating = True
        try:
            if abort:
                self._abort_all()
            if self._source is None:
                self._source = await asyncio.to_thread(WeightSource.of, self._replicas[0].config)
            source = await asyncio.to_thread(self._source.after, folder)
            await self._update_replicas(source, self._source)
            self._source = source
        finally:
            self._refuses = self._is_updating = False
            for replica in self._replicas:
                self._dispatcher.started(replica)  # with an empty cache

    def close(self) -> None:
        """Remove the weights that were received."""
        self._received.close()

    async def _update_replicas(self, source: WeightSource, before: WeightSource) -> None:
        updates = (replica.update_weights(source) for replica in self._replicas)
        results = await asyncio.gather(*updates, return_exceptions=True)
        errors = [result for result in results if result is not None]
        if not errors:
            return
        done = [replica for replica, result in zip(self._replicas, results, strict=True) if result is None]
        await asyncio.gather(*(replica.update_weights(before) for replica in done), return_exceptions=True)
        raise errors[0]
