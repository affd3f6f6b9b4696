"""The engine for servers: runs in processes of its own and serves many requests concurrently."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.core.batch import EngineOutput, SchedulerStats, total
from engine.core.engine_request import Adapter, EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.errors import EngineAsleepError, EngineDeadError, EngineError, ParameterError
from engine.models.errors import ModelError
from engine.models.files import Progress
from engine.processing.adapters import find_adapter
from engine.processing.model_info import ModelInfo
from engine.processing.output_collector import OutputCollector, RequestUpdate
from engine.replicas.deadline_timers import DeadlineTimers
from engine.replicas.dispatcher import Dispatcher
from engine.replicas.in_flight import InFlight
from engine.replicas.messages import Ready, Shutdown, Start
from engine.replicas.replica import Listener, Replica, check_gpus
from engine.replicas.start_times import remember
from engine.replicas.state import EngineState, StateBoard, combined
from engine.replicas.streams import Pace, Stream, Updates
from engine.structured.compile_threads import IDLE_SECONDS, CompileThreads
from engine.utils.fair_tasks import FairTasks
from engine.worker.parallel.cores import num_cores

if TYPE_CHECKING:
    from engine.processing.input_processor import InputProcessor

_log = logging.getLogger(__name__)

COMPILE_THREADS = 2  # at most; one core stays free for requests without a grammar
FEW_TEXTS = 16  # tokenizing so few texts takes less time than a thread switch
UPDATES_AT_ONCE = 16  # most updates made and sent in one iteration of the event loop
# Of all streams together: about half of what one core can send. With many streams, each gets fewer and longer updates.
UPDATES_PER_SECOND = 20_000


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
        self._streams: dict[str, Stream] = {}  # all streams with a reader
        self.in_flight = InFlight()
        self._deadlines = DeadlineTimers(lambda request_id: self._end_early(request_id, "timeout"))
        self._pace, self._fair = Pace(), FairTasks(UPDATES_AT_ONCE)
        self._closed = False
        self._changes_sleep, self._refuses, self._is_updating = asyncio.Lock(), False, False
        self.weights_path, self.weights_version = config.model, 0  # the version counts replacements
        self._compile_threads = CompileThreads(max(min(COMPILE_THREADS, num_cores() - 1), 1))
        self._release: asyncio.TimerHandle | None = None  # the next check whether these threads are idle
        self._launched = time.perf_counter()
        self._replicas: list[Replica] = []
        listener = Listener(self._show_state, self._started, self._freed, self._request_ended)
        for index in range(config.data_parallel_size):  # they import PyTorch while this process reads small files
            self._replicas.append(Replica(config, index, listener))
        self._dispatcher = Dispatcher(self._replicas)
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
    def num_requests(self) -> int:
        """The number of requests with a reader."""
        return len(self._streams)

    async def prepare(self, sampling: SamplingParams, tenant: str = "") -> SamplingParams:
        """Check the parameters and do the slow preparations for `generate`, once for all `n` completions of a request.

        Raises `ValueError` if they cannot be used. Does not block the event loop, and is fair between tenants.
        """
        structured, prepare = sampling.structured_outputs, self._input_processor.prepare
        texts = () if sampling.checked else (sampling.bad_words or (), sampling.dry_sequence_breakers or ())
        if (structured is None or structured.compiled is not None) and sum(map(len, texts)) + len(
            sampling.prediction or ""
        ) <= FEW_TEXTS:
            return prepare(sampling)
        if self._release is None:
            self._release = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._release_threads)
        return await asyncio.wrap_future(self._compile_threads.submit(tenant, prepare, sampling))

    def _release_threads(self) -> None:
        again = self._compile_threads.release()
        loop = asyncio.get_running_loop()
        self._release = loop.call_later(IDLE_SECONDS, self._release_threads) if again else None

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
        self._check_alive()
        request_id = request.request_id
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        output = OutputCollector(request.prompt_token_ids, request.sampling, self.model.tokenizer)
        stream = self._streams[request_id] = Stream(
            request, output, self._config.stream_interval, self._pace, self._fair
        )
        self._pace.seconds = len(self._streams) / UPDATES_PER_SECOND
        self.in_flight.add(request_id, request.tenant)
        self._dispatcher.assign(stream)
        self._deadlines.add(request)
        return Updates(stream, lambda: self._forget(request_id, stream))

    def _forget(self, request_id: str, stream: Stream) -> None:
        """The stream has lost its reader: abort the request if it is unfinished."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._deadlines.remove(request_id)
            self._pace.seconds = len(self._streams) / UPDATES_PER_SECOND
            self._end_request(stream)

    def _end_request(self, stream: Stream) -> None:
        self.in_flight.end(stream.request.request_id)
        self._dispatcher.remove(stream)

    async def abort(self, request_id: str) -> None:
        """Abort a request. Its reader gets the output so far, with `finish_reason` "abort". Unknown ids are ignored."""
        self._end_early(request_id, "abort")

    def abort_all(self) -> None:
        """Abort every request, as `abort` does."""
        for request_id in list(self._streams):
            self._end_early(request_id, "abort")

    def _end_early(self, request_id: str, finish_reason: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and not stream.output.finished:
            self._end_request(stream)
            stream.add(EngineOutput(request_id, [], finish_reason), time.monotonic())

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
        return self._refuses and not self._is_updating

    @property
    def sleep_level(self) -> int:
        """The level at which all replicas sleep; 0: one is awake."""
        return min(replica.sleep_level for replica in self._replicas)

    async def sleep(self, level: int = 1, *, abort: bool = False) -> None:
        """Free the memory of KV cache and weights until `wake_up`, see `Engine.sleep`. New requests are refused.

        Waits for the running requests, or ends them with `abort`. A process that is lost is started again awake.
        Raises `EngineError`; the engine is awake then.
        """
        async with self._changes_sleep:
            if self.sleep_level:
                return
            self._check_alive()
            self._refuses = True
            try:
                if abort:
                    self.abort_all()
                await asyncio.gather(*(replica.sleep(level) for replica in self._replicas))
            except BaseException:
                await self._wake_replicas()
                raise

    async def wake_up(self) -> None:
        """End `sleep`. Raises `EngineError` if memory is too low by now; the engine is still asleep then."""
        async with self._changes_sleep:
            await self._wake_replicas()

    async def update_weights(self, path: str, *, abort: bool = False) -> None:
        """Replace the weights by those in another folder, see `Engine.update_weights`. New requests are refused.

        Waits for the running requests, or ends them with `abort`. Raises `EngineError`: all weights are those of before
        then.
        """
        async with self._changes_sleep:
            self._check_alive()
            self._refuses = self._is_updating = True
            try:
                if abort:
                    self.abort_all()
                await self._update_replicas(path)
                self.weights_path, self.weights_version = path, self.weights_version + 1
            finally:
                self._refuses = self._is_updating = False
                for replica in self._replicas:
                    self._dispatcher.started(replica)  # with an empty cache

    async def _update_replicas(self, path: str) -> None:
        updates = (replica.update_weights(path) for replica in self._replicas)
        results = await asyncio.gather(*updates, return_exceptions=True)
        errors = [result for result in results if result is not None]
        if not errors:
            return
        done = [replica for replica, result in zip(self._replicas, results, strict=True) if result is None]
        await asyncio.gather(*(replica.update_weights(self.weights_path) for replica in done), return_exceptions=True)
        raise errors[0]

    async def _wake_replicas(self) -> None:
        await asyncio.gather(*(replica.wake_up() for replica in self._replicas))
        self._refuses = False
        for replica in self._replicas:
            self._dispatcher.started(replica)  # with an empty cache

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
        if self._release is not None:
            self._release.cancel()
        self._compile_threads.shutdown()
        if self.state.phase != "dead":
            self._end("the engine was closed")
        self._task.cancel()
        for replica in self._replicas:  # in parallel: each may take seconds to stop
            replica.supervisor.send(Shutdown())
        for replica in self._replicas:
            replica.supervisor.close()

    async def _run(self) -> None:
        """Load the parts of the model that this process needs, then keep the replicas running."""
        try:
            self._processor = processor = await asyncio.to_thread(_load_processor, self._config, self._progress())
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

    def _progress(self) -> Callable[[str, int, int], None]:
        """Return a thread-safe progress callback."""
        loop, replicas = asyncio.get_running_loop(), self._replicas

        def show(phase: str, fraction: float | None) -> None:
            for replica in replicas:
                replica.states.advance(phase, fraction)

        def progress(phase: str, done: int, total: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(show, phase, done / total if total else None)

        return progress

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
        self._processor = self._input_processor.with_context(min(ready.max_model_len for ready in said))
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

    def _freed(self, replica: Replica, streams: list[Stream]) -> None:
        """A replica has lost its process: assign its requests to others, or let them wait for the new process."""
        self._dispatcher.lost(replica, streams)
        if all(replica.states.state.phase == "dead" for replica in self._replicas):
            self._end(replica.states.state.reason)

    def _request_ended(self, stream: Stream) -> None:
        self.in_flight.end(stream.request.request_id)
        self._dispatcher.ended(stream)

    def _end(self, reason: str) -> None:
        """Fail all requests: the processes have ended and are not restarted."""
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError(reason))
        for replica in self._replicas:
            replica.stats = None
            replica.states.enter("dead", reason=reason)
        for stream in self._streams.values():
            stream.close(reason)

    def _check_alive(self) -> None:
        if self.state.phase == "dead":
            raise EngineDeadError(self.state.reason)
        if self._is_updating:
            raise EngineAsleepError("the model's weights are being replaced")
        if self._refuses:
            raise EngineAsleepError("the model is asleep: POST /wake_up wakes it up")


def _load_processor(config: EngineConfig, progress: Progress) -> InputProcessor:
    from engine.processing.input_processor import InputProcessor  # by now the engine processes are importing as well

    return InputProcessor.load(config, progress)
