"""The engine for servers: it runs in a process of its own and answers many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.core.batch import EngineOutput, SchedulerStats
from engine.core.engine_request import EngineRequest
from engine.core.sampling_params import SamplingParams
from engine.engine_process import EngineProcess
from engine.errors import EngineDeadError, EngineError
from engine.fair_executor import FairExecutor
from engine.input_processor import InputProcessor
from engine.messages import Abort, Add, Ready, Start, Step
from engine.models.spec import ModelSpec
from engine.output_collector import OutputCollector, RequestUpdate, deliver
from engine.outstanding import Outstanding
from engine.start_times import expected_seconds, remember
from engine.state import EngineState, StateHolder
from engine.step_tokens import StepTokens
from engine.structured.grammar import make_executor
from engine.supervisor import RestartPolicy, Supervisor
from engine.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

COMPILE_THREADS = 2
FEW_TEXTS = 16  # are made into tokens in less time than it takes to ask a thread
UPDATES_PER_SECOND = (
    20_000  # of all streams: crowded ones get fewer and longer updates, about half of what one core can send
)
MAX_LOSSES = 2  # of the engine process that a waiting request outlives: it may be what kills it


class AsyncEngine:
    """A running engine process and the requests it works on. Belongs to the event loop that started it.

    engine = await AsyncEngine.start(EngineConfig(model="..."))
    async for update in engine.generate(EngineRequest("1", engine.tokenizer.encode("Once"), SamplingParams(max_tokens=50))):
        print(update.text, end="")
    engine.close()

    When the process is lost it is started again, unless that happens too often. Requests that have begun to answer then
    end with `EngineDeadError`; the others, and new ones, wait for the new process.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Use `start` or `launch`."""
        self._config = config
        self._states = StateHolder(expected_seconds=expected_seconds(config))
        self._processor: InputProcessor | None = None  # None until it is loaded
        self._streams: dict[str, _Stream] = {}
        self.outstanding = Outstanding()
        self._pace = _Pace()
        self._closed = False
        self._compile_threads: FairExecutor | None = None
        self.stats: SchedulerStats | None = None  # the newest; None while there is no process that is ready
        self.step_tokens = StepTokens()
        self._launched = time.perf_counter()
        self._supervisor = Supervisor(
            EngineProcess(),  # it imports PyTorch while the small files are read here
            self,
            self._states,
            RestartPolicy(config.engine_restarts),
            config.engine_watchdog_timeout,
        )
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
    max_num_seqs: int
    num_blocks: int
    block_size: int
    summary: str  # the start in one line

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._supervisor.process.pid

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
        if self._compile_threads is None:
            self._compile_threads = FairExecutor(make_executor(COMPILE_THREADS))
        return await asyncio.wrap_future(self._compile_threads.submit(owner, prepare, sampling))

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
        stream = self._streams[request_id] = _Stream(request, output, self._config.stream_interval, self._pace)
        self.outstanding.add(request_id, request.owner)
        self._supervisor.send(Add(request))
        return _Updates(stream, lambda: self._forget(request_id, stream))

    def _forget(self, request_id: str, stream: _Stream) -> None:
        """The reader of the stream wants no more: end the request if it has not ended."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self.outstanding.end(request_id)
            if not stream.output.finished:
                self._supervisor.send(Abort(request_id))

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
            self._supervisor.send(Abort(request_id))
            self.outstanding.end(request_id)
            stream.add(EngineOutput(request_id, [], "abort"), time.monotonic())

    def close(self) -> None:
        """End the process; waits for it. Requests that still run get `EngineDeadError`."""
        if self._closed:
            return
        self._closed = True
        if self._compile_threads is not None:
            self._compile_threads.shutdown()
        if self.state.phase != "dead":
            self._end("the engine was closed")
        self._task.cancel()
        self._supervisor.close()

    async def _run(self) -> None:
        """Load what this process needs of the model, then keep an engine process running."""
        try:
            self._processor = processor = await asyncio.to_thread(InputProcessor.load, self._config, self._progress())
            self._end(await self._supervisor.run(Start(processor.local(self._config), processor.eos_token_ids)))
        except Exception as error:
            if self._ready.done():
                _log.critical("the engine process cannot be watched any more", exc_info=error)
            else:
                self._ready.set_exception(error)
            self._end(str(error))

    def _progress(self) -> Callable[[str, int, int], None]:
        """For another thread to say how far it is."""
        loop, states = asyncio.get_running_loop(), self._states

        def progress(phase: str, done: int, total: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(states.advance, phase, done / total if total else None)

        return progress

    # ---- what the supervisor tells ----

    def started(self, ready: Ready) -> None:
        """The process takes requests: it gets all that wait for it."""
        self.max_model_len, self.stats = ready.max_model_len, ready.stats
        self.num_blocks, self.block_size = ready.num_blocks, ready.block_size
        self.max_num_seqs = ready.max_num_seqs
        for stream in self._streams.values():
            if not stream.output.finished and not stream.is_closed:
                self._supervisor.send(Add(stream.request))
        if not self._ready.done():
            self.summary = f"{ready.summary} · ready in {time.perf_counter() - self._launched:.1f} s"
            self._ready.set_result(None)
            remember(self._config, self._states.start_seconds or 0.0)

    def stepped(self, step: Step) -> None:
        """A step's outputs, for those who wait for them."""
        self.stats = step.stats
        self.step_tokens.see(step.stats)
        self._pace.seconds = len(self._streams) / UPDATES_PER_SECOND
        deliver(step.outputs, self._streams, time.monotonic())
        for output in step.outputs.outputs:
            if output.finish_reason is not None:
                self.outstanding.end(output.request_id)

    def lost(self, reason: str) -> None:
        """The process is gone. Requests whose answers have begun end, and so do those that have seen this too often."""
        self.stats = None
        for stream in self._streams.values():
            stream.num_losses += 1
            if stream.has_begun or stream.num_losses > MAX_LOSSES:
                stream.close(reason)

    def _end(self, reason: str) -> None:
        """The process is gone, and no other will come."""
        self.stats = None
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError(reason))
        self._states.enter("dead", reason=reason)
        for stream in self._streams.values():
            stream.close(reason)

    def _check_alive(self) -> None:
        if self.state.phase == "dead":
            raise EngineDeadError(self.state.reason)


@dataclass(slots=True)
class _Pace:
    """Seconds between two updates of a stream, the same for all: longer, the more streams there are."""

    seconds: float = 0.0


class _Stream:
    """An `OutputCollector` that one task can wait for."""

    def __init__(self, request: EngineRequest, output: OutputCollector, interval: int, pace: _Pace) -> None:
        """`interval`: tokens per update, after the first token and unless it carries more than tokens."""
        self.request, self.output = request, output
        self.num_losses = 0  # of the engine process, since the request came
        self.ready = False  # there is something to take
        self._interval, self._pace, self._num_held = interval, pace, 0
        self._latest = 0.0  # when tokens last made it ready
        self._death: str | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a part of the answer has come."""
        return self.output.metrics.first_token_ts > 0 or self.output.finished

    @property
    def is_closed(self) -> bool:
        return self._death is not None

    def add(self, output: EngineOutput, now: float) -> None:
        if not self.output.finished:
            self.output.add(output, now)
            self.ready = True
            self._wake()

    def add_token(self, token_id: int, now: float) -> None:
        if not self.output.finished:
            self.output.add_token(token_id, now)
            self._num_held += 1
            if self._num_held >= self._interval and now - self._latest >= self._pace.seconds:
                self._latest = now
                self.ready = True
                self._wake()

    def take(self) -> RequestUpdate:
        self.ready, self._num_held = False, 0
        return self.output.take()

    def close(self, how: str) -> None:
        """Nothing more will come; `how` the engine died."""
        self._death = how
        self.ready = self.output.has_output
        self._wake()

    def changed(self) -> asyncio.Future[None]:
        """Done when there may be pending. `EngineDeadError` when there never will be any."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Updates(AsyncGenerator[RequestUpdate, None]):
    """The updates of a request that is running already. For one reader."""

    def __init__(self, stream: _Stream, forget: Callable[[], None]) -> None:
        """`forget`: to be called once in the event loop, when the reader is gone."""
        self._stream, self._forget = stream, forget
        self._loop = asyncio.get_running_loop()
        self._ended = False

    async def __anext__(self) -> RequestUpdate:
        if self._ended:
            raise StopAsyncIteration
        stream = self._stream
        try:
            while not stream.ready:
                await stream.changed()
            update = stream.take()
        except BaseException:
            self._end()
            raise
        if update.finish_reason is not None:
            self._end()
        return update

    async def asend(self, value: None) -> RequestUpdate:
        return await self.__anext__()

    async def athrow(self, *error: Any) -> RequestUpdate:
        self._end()
        return await super().athrow(*error)

    async def aclose(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._forget()

    def __del__(self) -> None:  # in whatever thread drops it
        if not self._ended:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the engine with it
                self._loop.call_soon_threadsafe(self._forget)
