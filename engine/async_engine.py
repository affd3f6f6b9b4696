"""The engine for servers: runs in processes of its own and serves many requests concurrently."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.core.batch import SchedulerStats, total
from engine.core.engine_request import Adapter, EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.errors import EngineDeadError, EngineError, ParameterError
from engine.models.errors import ModelError
from engine.models.files import Progress
from engine.processing.adapters import find_adapter
from engine.processing.output_collector import OutputCollector, RequestUpdate
from engine.processing.preparation import Preparation
from engine.replicas.availability import Availability
from engine.replicas.dispatcher import Dispatcher
from engine.replicas.guest import Guests
from engine.replicas.messages import Ready, Shutdown, Start
from engine.replicas.replica import Listener, Replica, check_gpus
from engine.replicas.start_times import remember
from engine.replicas.state import EngineState, StateBoard, combined
from engine.replicas.stream_table import StreamTable
from engine.replicas.streams import RunningStream

if TYPE_CHECKING:
    from engine.processing.input_processor import InputProcessor
    from engine.processing.model_info import ModelInfo

_log = logging.getLogger(__name__)


class AsyncEngine:
    """Runs one or more engine processes (replicas) and their requests. Use it in the event loop that started it.

    engine = await AsyncEngine.start(EngineConfig(model="..."))
    request = EngineRequest("1", engine.model.tokenizer.encode("Once"), SamplingParams(max_tokens=50))
    async for update in engine.generate(request):
        print(update.text, end="")
    engine.close()

    If a process is lost, it is restarted, unless that happens too often. Its requests with output already sent end with
    `EngineDeadError`. All other requests wait for the new process.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Use `start` or `launch`."""
        check_gpus(config)
        self._config = config
        self._states = StateBoard()
        self._processor: InputProcessor | None = None  # None until loaded
        self._closed = False
        self._preparation = Preparation()
        self._launched = time.perf_counter()
        self._replicas: list[Replica] = []
        listener = Listener(self._show_state, self._started, self._freed, lambda stream: self._streams.ended(stream))
        for index in range(config.data_parallel_size):  # they import PyTorch while this process reads small files
            self._replicas.append(Replica(config, index, listener))
        self._dispatcher = dispatcher = Dispatcher(self._replicas)
        self._streams = StreamTable(dispatcher, config.stream_interval)
        self.in_flight = self._streams.in_flight
        self._availability = Availability(self._replicas, dispatcher, config.model, self._check_alive, self.abort_all)
        self.guests = Guests(self._availability, self._streams)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # `ready` raises it
        self._task = asyncio.create_task(self._run())

    @classmethod
    def launch(cls, config: EngineConfig) -> AsyncEngine:
        """Start loading the model in a new process and return at once. Requires a running event loop.

        Until `ready` returns, only `state` and `close` may be used.
        """
        return cls(config)

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncEngine:
        """Launch an engine and wait until it is ready, with progress shown on the terminal. Raises as `ready` does."""
        engine = cls.launch(config)
        try:
            await engine.ready()
        except BaseException:
            engine.close()
            raise
        return engine

    async def ready(self) -> None:
        """Wait until the model is loaded for the first time. All other attributes are available from then on.

        Raises `ModelError`, `TokenizerError`, `ConfigError`, or `EngineError` with the message of the process.
        """
        await asyncio.shield(self._ready)

    @property
    def state(self) -> EngineState:
        """The current state of the engine."""
        return self._states.state

    async def state_change(self, seen: EngineState) -> EngineState:
        """Wait until the state differs from `seen`, and return it."""
        return await self._states.change(seen)

    max_num_seqs: int  # sum over all replicas, as is num_blocks
    num_blocks: int
    block_size: int
    summary: str  # description of the engine, a few lines

    @property
    def replicas(self) -> Sequence[Replica]:
        """The engine processes: `data_parallel_size` of them."""
        return self._replicas

    @property
    def stats(self) -> SchedulerStats | None:
        """The latest statistics, summed over all replicas; None while no replica is ready."""
        return total([replica.stats for replica in self._replicas if replica.stats is not None])

    @property
    def _input_processor(self) -> InputProcessor:
        if self._processor is None:
            raise EngineError("the engine is starting: the model is not loaded yet")
        return self._processor

    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        return self._input_processor.info

    @property
    def local_config(self) -> EngineConfig:
        """The configuration, with the model's folder on this machine."""
        return replace(self._config, model=str(self._input_processor.folder))

    @property
    def num_requests(self) -> int:
        """The number of requests with a reader."""
        return len(self._streams)

    async def prepare(self, sampling: SamplingParams, tenant: str = "") -> SamplingParams:
        """Check the parameters and do the slow preparations for `generate`, once for all `n` completions of a request.

        Raises `ValueError` if they cannot be used. Does not block the event loop, and is fair between tenants.
        """
        return await self._preparation.run(self._input_processor.prepare, sampling, tenant)

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]:
        """Generate a completion as updates; the last one has a `finish_reason`. An embedding is one update.

        The engine starts at once, even if nothing reads the updates yet. A slow reader gets fewer and longer updates.
        Closing or dropping the iterator, or cancelling the task that waits for it, aborts the request. At its deadline
        it ends with the `finish_reason` "timeout", wherever it waits or runs.

        Raises `ValueError`, at once, for a request that cannot run. Raises `EngineDeadError` if the process is lost
        after the first output, or is not restarted any more, and `EngineAsleepError` while the engine sleeps.
        """
        if request.sampling.n != 1:
            reason = "must be 1 for one answer (see engine.processing.output_collector.with_samples), got"
            raise ParameterError("n", f"{reason} {request.sampling.n}")
        request = self._input_processor.check(request)
        self._availability.check()
        output = OutputCollector(request.prompt_token_ids, request.sampling, self.model.tokenizer)
        return self._streams.open(request, output)

    async def abort(self, request_id: str) -> None:
        """Abort a request. Its reader gets the output so far, with `finish_reason` "abort". Unknown ids are ignored."""
        self._streams.end_early(request_id, "abort")

    def abort_all(self) -> None:
        """Abort every request, as `abort` does."""
        self._streams.end_all("abort")

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix caches of all replicas. Returns False if one was not: requests are running there.

        Raises `EngineDeadError` while a replica has no process.
        """
        return all(await asyncio.gather(*(replica.call("reset_prefix_cache") for replica in self._replicas)))

    @property
    def max_loras(self) -> int:
        """Number of LoRA adapters that run at a time on each replica; 0: none are served."""
        return self._config.max_loras if self._config.enable_lora else 0

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Return the LoRA adapter in a folder for requests, once all replicas have read and checked it.

        A replica that has dropped it from memory since, or has a new process, reads it again for a request. Raises
        `ModelError` if it cannot be used, and `EngineDeadError` while a replica has no process.
        """
        adapter = await asyncio.to_thread(find_adapter, name, path)
        fields = {"name": adapter.name, "path": adapter.path, "version": adapter.version}
        reasons = await asyncio.gather(*(replica.call("load_adapter", **fields) for replica in self._replicas))
        if reason := next(filter(None, reasons), ""):
            raise ModelError(reason)
        return adapter

    @property
    def is_sleeping(self) -> bool:
        """Return whether the engine sleeps, goes to sleep or wakes up: it takes no requests."""
        return self._availability.is_sleeping

    @property
    def sleep_level(self) -> int:
        """The level at which all replicas sleep; 0: one is awake."""
        return self._availability.sleep_level

    async def sleep(self, level: int = 1, *, abort: bool = False) -> None:
        """Free the memory of KV cache and weights until `wake_up`, see `Engine.sleep`. New requests are refused.

        Waits for the running requests, or ends them with `abort`. A process that is lost is started again awake.
        Raises `EngineError`; the engine is awake then.
        """
        await self._availability.sleep(level, abort=abort)

    async def wake_up(self) -> None:
        """End `sleep`. Raises `EngineError` if memory is too low by now; the engine is still asleep then."""
        await self._availability.wake_up()

    @property
    def weights_path(self) -> str:
        """The folder or name of the weights."""
        return self._availability.weights_path

    @property
    def weights_version(self) -> int:
        """The number of times that the weights were replaced."""
        return self._availability.weights_version

    async def update_weights(self, path: str, *, abort: bool = False) -> None:
        """Replace the weights by those in another folder, or if it has no config.json, some tensors by those in it; or
        by tensors that `send_weights` sends from an address. See `Engine.update_weights`. New requests are refused.
        Waits for the running requests, or ends them with `abort`. Raises `EngineError`: all weights are those of before
        then.
        """
        await self._availability.update_weights(path, abort=abort)

    async def restart(self, drain_seconds: float) -> None:
        """Restart the processes, one replica after the other.

        Each replica restarts when its requests have finished, or after `drain_seconds`. Meanwhile new requests go to
        the other replicas, or wait if there is none.
        """
        for replica in self._replicas:
            try:
                await replica.restart(drain_seconds)
            finally:
                self._dispatcher.assign_waiting()

    def close(self) -> None:
        """Stop the processes and wait for them. Unfinished requests end with `EngineDeadError`."""
        if self._closed:
            return
        self._closed = True
        self._preparation.close()
        if self.state.phase != "dead":
            self._end("the engine was closed")
        self._task.cancel()
        for replica in self._replicas:  # in parallel: each may take seconds to stop
            replica.supervisor.send(Shutdown())
        for replica in self._replicas:
            replica.supervisor.close()
        self._availability.close()

    async def _run(self) -> None:
        """Load the parts of the model that this process needs, then keep the replicas running."""
        try:
            progress = _progress(self._replicas)
            self._processor = processor = await asyncio.to_thread(_load_processor, self._config, progress)
            start = Start(processor.local(self._config), processor.eos_token_ids)
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(replica.run(start)) for replica in self._replicas]
            self._end(running[-1].result())
        except ExceptionGroup as group:
            self._failed(group.exceptions[0])
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self._ready.done():
            _log.critical("the engine processes can no longer be watched", exc_info=error)
        else:
            self._ready.set_exception(error)
        self._end(str(error))

    # ---- callbacks of the replicas ----

    def _show_state(self) -> None:
        if self._replicas:
            self._states.show(combined([replica.states.state for replica in self._replicas], self._ready.done()))

    def _started(self, replica: Replica) -> None:
        """The replica accepts requests. When all replicas do so for the first time, the engine is ready."""
        said = [replica.ready for replica in self._replicas if replica.ready is not None]
        if len(said) == len(self._replicas):
            self._describe(said)
        self._dispatcher.started(replica)

    def _describe(self, said: Sequence[Ready]) -> None:
        """Take over the properties that all replicas reported when they became ready."""
        first, num_replicas = said[0], len(said)
        context = min(ready.max_model_len for ready in said)
        self._processor = self._input_processor.of_engine(context, first.fingerprint)
        self.num_blocks, self.block_size = sum(ready.num_blocks for ready in said), first.block_size
        self.max_num_seqs = sum(ready.max_num_seqs for ready in said)
        if self._ready.done():
            return
        capacity = min(ready.num_blocks for ready in said) * first.block_size
        self._dispatcher.open(capacity, self.max_loras)
        replicas = f"{num_replicas} replicas, each: " if num_replicas > 1 else ""
        self.summary = f"{replicas}{first.summary} · ready in {time.perf_counter() - self._launched:.1f} s"
        self._ready.set_result(None)
        self._show_state()
        remember(self._config, max(replica.states.start_seconds or 0.0 for replica in self._replicas))

    def _freed(self, replica: Replica, streams: list[RunningStream]) -> None:
        """A replica has lost its process: assign its requests to others, or let them wait for the new process."""
        self._dispatcher.lost(replica, streams)
        if all(replica.states.state.phase == "dead" for replica in self._replicas):
            self._end(replica.states.state.reason)

    def _end(self, reason: str) -> None:
        """Fail all requests: the processes have ended and are not restarted."""
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError(reason))
        for replica in self._replicas:
            replica.stats = None
            replica.states.enter("dead", reason=reason)
        self._streams.close(reason)

    def _check_alive(self) -> None:
        if self.state.phase == "dead":
            raise EngineDeadError(self.state.reason)


def _progress(replicas: Sequence[Replica]) -> Progress:
    """Return a thread-safe callback that shows progress in the states of the replicas."""
    loop = asyncio.get_running_loop()

    def show(phase: str, fraction: float | None) -> None:
        for replica in replicas:
            replica.states.advance(phase, fraction)

    def progress(phase: str, done: int, total: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(show, phase, done / total if total else None)

    return progress


def _load_processor(config: EngineConfig, progress: Progress) -> InputProcessor:
    from engine.processing.input_processor import InputProcessor  # by now the engine processes are importing as well

    return InputProcessor.load(config, progress)
