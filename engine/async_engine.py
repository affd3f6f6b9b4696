"""The engine for servers: it runs in a process of its own and answers many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.core.batch import EngineOutput, SchedulerStats, total
from engine.core.engine_request import EngineRequest
from engine.core.sampling_params import SamplingParams
from engine.dispatcher import Dispatcher
from engine.errors import EngineDeadError, EngineError
from engine.messages import Ready, Shutdown, Start
from engine.models.classifier import Classifier
from engine.models.progress import Progress
from engine.models.spec import ModelSpec
from engine.output_collector import OutputCollector, RequestUpdate
from engine.outstanding import Outstanding
from engine.replica import Listener, Replica, check_gpus
from engine.start_times import remember
from engine.state import EngineState, StateBoard, combined
from engine.streams import Pace, Stream, Updates
from engine.structured.compile_threads import IDLE_SECONDS, CompileThreads
from engine.text.tokenizer import Tokenizer
from engine.turns import Turns
from engine.worker.cores import num_cores

if TYPE_CHECKING:
    from engine.input_processor import InputProcessor

_log = logging.getLogger(__name__)

COMPILE_THREADS = 2  # at most; one core is left to those who do not wait for a grammar
FEW_TEXTS = 16  # are made into tokens in less time than it takes to ask a thread
UPDATES_AT_ONCE = 16  # made and sent in one iteration of the event loop, at most
UPDATES_PER_SECOND = (
    20_000  # of all streams: crowded ones get fewer and longer updates, about half of what one core can send
)


class AsyncEngine:
    """Running engine processes, the replicas, and the requests they work on. Belongs to the event loop that started it.

    engine = await AsyncEngine.start(EngineConfig(model="..."))
    async for update in engine.generate(EngineRequest("1", engine.tokenizer.encode("Once"), SamplingParams(max_tokens=50))):
        print(update.text, end="")
    engine.close()

    When the process is lost it is started again, unless that happens too often. Requests that have begun to answer then
    end with `EngineDeadError`; the others, and new ones, wait for the new process.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Use `start` or `launch`."""
        check_gpus(config)
        self._config = config
        self._states = StateBoard()
        self._processor: InputProcessor | None = None  # None until it is loaded
        self._streams: dict[str, Stream] = {}  # all that are read
        self.outstanding = Outstanding()
        self._pace, self._turns = Pace(), Turns(UPDATES_AT_ONCE)
        self._closed = False
        self._compile_threads = CompileThreads(max(min(COMPILE_THREADS, num_cores() - 1), 1))
        self._release: asyncio.TimerHandle | None = None  # of these threads, once they are idle
        self._launched = time.perf_counter()
        self._replicas: list[Replica] = []
        listener = Listener(self._show_state, self._started, self._freed, self._request_ended)
        for index in range(config.data_parallel_size):  # they import PyTorch while the small files are read here
            self._replicas.append(Replica(config, index, listener))
        self._dispatcher = Dispatcher(self._replicas)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # it is raised by `ready`
        self._task = asyncio.create_task(self._run())

    @classmethod
    def launch(cls, config: EngineConfig) -> AsyncEngine:
        """Begin to load the model in a new process, and return at once. Until `ready` returns there are only `state` and
        `close`. To be called in a running event loop.
        """
        return cls(config)

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncEngine:
        """`launch`, and wait until it is ready. The process shows its progress on the terminal. Raises as `ready`."""
        engine = cls.launch(config)
        try:
            await engine.ready()
        except BaseException:
            engine.close()
            raise
        return engine

    async def ready(self) -> None:
        """Wait until the model is loaded for the first time; what is below `state` is there from then on.

        Raises `ModelError`, `TokenizerError`, `ConfigError`; `EngineError` with what the process says is wrong.
        """
        await asyncio.shield(self._ready)

    @property
    def state(self) -> EngineState:
        """What the engine is doing at this moment."""
        return self._states.state

    async def state_change(self, seen: EngineState) -> EngineState:
        """The present state, once it is another one than `seen`."""
        return await self._states.change(seen)

    max_model_len: int
    max_num_seqs: int  # of all replicas together, as is num_blocks
    num_blocks: int
    block_size: int
    summary: str  # the start in one line

    @property
    def replicas(self) -> Sequence[Replica]:
        """The engine processes; more than one with `data_parallel_size`."""
        return self._replicas

    @property
    def stats(self) -> SchedulerStats | None:
        """The newest of all replicas together; None while none is ready."""
        return total([replica.stats for replica in self._replicas if replica.stats is not None])

    @property
    def _input_processor(self) -> InputProcessor:
        if self._processor is None:
            raise EngineError("the engine is starting: nothing is known of the model yet")
        return self._processor

    @property
    def model_name(self) -> str:
        return self._input_processor.model_name

    @property
    def spec(self) -> ModelSpec:
        return self._input_processor.spec

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self._input_processor.eos_token_ids

    @property
    def architecture(self) -> str:
        """By its makers' name, such as LlamaForCausalLM."""
        return self._input_processor.spec.architecture

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._input_processor.tokenizer

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that the model's makers suggest."""
        return self._input_processor.default_sampling

    @property
    def generates(self) -> bool:
        """Whether the model does more than embeddings."""
        return self._input_processor.spec.has_head

    @property
    def classifier(self) -> Classifier | None:
        """The head of a model that is a classifier."""
        return self._input_processor.classifier

    @property
    def default_pooling(self) -> str:
        return self._input_processor.default_pooling

    @property
    def num_requests(self) -> int:
        """Requests whose outputs are still read."""
        return len(self._streams)

    async def prepare(self, sampling: SamplingParams, owner: str = "") -> SamplingParams:
        """The parameters checked, for `generate`: what in it may take a while, once for all answers to a request.

        `ValueError` when they cannot be used. Others go on meanwhile, and `owner`'s work does not delay that of others.
        """
        structured, prepare = sampling.structured_outputs, self._input_processor.prepare
        texts = () if sampling.checked else (sampling.bad_words or (), sampling.dry_sequence_breakers or ())
        if (structured is None or structured.compiled is not None) and sum(map(len, texts)) <= FEW_TEXTS:
            return prepare(sampling)
        if self._release is None:
            self._release = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._release_threads)
        return await asyncio.wrap_future(self._compile_threads.submit(owner, prepare, sampling))

    def _release_threads(self) -> None:
        again = self._compile_threads.release()
        loop = asyncio.get_running_loop()
        self._release = loop.call_later(IDLE_SECONDS, self._release_threads) if again else None

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]:
        """The answer, as updates; the last one has a `finish_reason`. An embedding comes in one update.

        The engine begins at once, whether or not the answer is read yet. A slow reader gets fewer and longer updates.

        `ValueError`, at once, for a request that cannot run; `EngineDeadError` when the process is gone for good, or lost
        after the answer has begun.
        Closing or dropping the iterator, or cancelling the task that waits for it, ends the request.
        """
        if request.sampling.n != 1:
            raise ValueError(
                f"n must be 1 for one answer (see engine.output_collector.with_samples), got {request.sampling.n}"
            )
        request = self._input_processor.check(request)
        self._check_alive()
        request_id = request.request_id
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        output = OutputCollector(request.prompt_token_ids, request.sampling, self.tokenizer)
        stream = self._streams[request_id] = Stream(
            request, output, self._config.stream_interval, self._pace, self._turns
        )
        self._pace.seconds = len(self._streams) / UPDATES_PER_SECOND
        self.outstanding.add(request_id, request.owner)
        self._dispatcher.assign(stream)
        return Updates(stream, lambda: self._forget(request_id, stream))

    def _forget(self, request_id: str, stream: Stream) -> None:
        """The reader of the stream wants no more: end the request if it has not ended."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._pace.seconds = len(self._streams) / UPDATES_PER_SECOND
            self._end_request(stream)

    def _end_request(self, stream: Stream) -> None:
        self.outstanding.end(stream.request.request_id)
        self._dispatcher.remove(stream)

    async def abort(self, request_id: str) -> None:
        """End a request: its reader gets what there is, with `finish_reason` "abort". Unknown ids are fine."""
        self._abort(request_id)

    def abort_all(self) -> None:
        """End every request, as `abort` does."""
        for request_id in list(self._streams):
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and not stream.output.finished:
            self._end_request(stream)
            stream.add(EngineOutput(request_id, [], "abort"), time.monotonic())

    async def restart(self, drain_seconds: float) -> None:
        """Start the processes anew, one replica after the other, each once its requests have ended or `drain_seconds` are
        over. Meanwhile the other replicas take the requests; without another one they wait.
        """
        for replica in self._replicas:
            try:
                await replica.restart(drain_seconds)
            finally:
                self._dispatcher.assign_waiting()

    def close(self) -> None:
        """End the processes; waits for them. Requests that still run get `EngineDeadError`."""
        if self._closed:
            return
        self._closed = True
        if self._release is not None:
            self._release.cancel()
        self._compile_threads.shutdown()
        if self.state.phase != "dead":
            self._end("the engine was closed")
        self._task.cancel()
        for replica in self._replicas:  # each may take seconds to end: side by side
            replica.supervisor.send(Shutdown())
        for replica in self._replicas:
            replica.supervisor.close()

    async def _run(self) -> None:
        """Load what this process needs of the model, then keep the replicas running."""
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
            _log.critical("the engine processes cannot be watched any more", exc_info=error)
        else:
            self._ready.set_exception(error)
        self._end(str(error))

    def _progress(self) -> Callable[[str, int, int], None]:
        """For another thread to say how far it is."""
        loop, replicas = asyncio.get_running_loop(), self._replicas

        def show(phase: str, fraction: float | None) -> None:
            for replica in replicas:
                replica.states.advance(phase, fraction)

        def progress(phase: str, done: int, total: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(show, phase, done / total if total else None)

        return progress

    # ---- what the replicas tell ----

    def _show_state(self) -> None:
        if self._replicas:
            self._states.show(combined([replica.states.state for replica in self._replicas], self._ready.done()))

    def _started(self, replica: Replica) -> None:
        """It takes requests; once all do for the first time, the engine is ready."""
        said = [replica.ready for replica in self._replicas if replica.ready is not None]
        if len(said) == len(self._replicas):
            self._describe(said)
        self._dispatcher.started(replica)

    def _describe(self, said: Sequence[Ready]) -> None:
        """What all replicas have said when they were ready."""
        first, num_replicas = said[0], len(said)
        self.max_model_len = min(ready.max_model_len for ready in said)
        self._processor = self._input_processor.with_context(self.max_model_len)
        self.num_blocks, self.block_size = sum(ready.num_blocks for ready in said), first.block_size
        self.max_num_seqs = sum(ready.max_num_seqs for ready in said)
        if self._ready.done():
            return
        capacity = min(ready.num_blocks for ready in said) * first.block_size
        self._dispatcher.open(capacity)
        replicas = f"{num_replicas} replicas, each: " if num_replicas > 1 else ""
        self.summary = f"{replicas}{first.summary} · ready in {time.perf_counter() - self._launched:.1f} s"
        self._ready.set_result(None)
        self._show_state()
        remember(self._config, max(replica.states.start_seconds or 0.0 for replica in self._replicas))

    def _freed(self, replica: Replica, streams: list[Stream]) -> None:
        """A replica has lost its process: other replicas take its requests, or they wait for the next process."""
        self._dispatcher.lost(replica, streams)
        if all(replica.states.state.phase == "dead" for replica in self._replicas):
            self._end(replica.states.state.reason)

    def _request_ended(self, stream: Stream) -> None:
        self.outstanding.end(stream.request.request_id)
        self._dispatcher.ended(stream)

    def _end(self, reason: str) -> None:
        """The processes are gone, and no others will come."""
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


def _load_processor(config: EngineConfig, progress: Progress) -> InputProcessor:
    from engine.input_processor import InputProcessor  # by now the engine processes are importing, too

    return InputProcessor.load(config, progress)
