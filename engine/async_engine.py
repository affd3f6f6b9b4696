"""The engine for servers: it runs in a process of its own and answers many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.core.batch import EngineOutput, SchedulerStats
from engine.core.engine_request import EngineRequest
from engine.core.sampling_params import SamplingParams
from engine.errors import EngineDeadError, EngineError
from engine.input_processor import InputProcessor
from engine.messages import Abort, Add, Command, Failed, Ready, Shutdown, Start, Step, decode_event, encode
from engine.models.spec import ModelSpec
from engine.output_collector import OutputCollector, RequestUpdate, deliver
from engine.structured.grammar import make_executor
from engine.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

ENGINE_MODULE = "engine.process"  # what runs in the other process
COMPILE_THREADS = 2
FEW_TEXTS = 16  # are made into tokens in less time than it takes to ask a thread
UPDATES_PER_SECOND = (
    20_000  # of all streams: crowded ones get fewer and longer updates, about half of what one core can send
)
EXIT_SECONDS = 10  # that the engine process may take to end by itself
DRAIN_SECONDS = 0.2  # for what a dead process sent before it died to arrive


class AsyncEngine:
    """A running engine process and the requests it works on. Belongs to the event loop that started it.

    engine = await AsyncEngine.start(EngineConfig(model="..."))
    async for update in engine.generate(EngineRequest("1", engine.tokenizer.encode("Once"), SamplingParams(max_tokens=50))):
        print(update.text, end="")
    engine.close()
    """

    def __init__(self, input_processor: InputProcessor, process: _EngineProcess, stream_interval: int) -> None:
        """Use `start`."""
        self._input_processor, self._process, self._stream_interval = input_processor, process, stream_interval
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, _Stream] = {}
        self._pace = _Pace()
        self._closed = False
        self._compile_threads: ThreadPoolExecutor | None = None
        self.dead = False  # the process is gone
        self.death = ""  # how it went
        self.stats: SchedulerStats | None = None  # the newest; None until `start` is done
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._reader_ended)
        process.on_exit(self._exited)

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncEngine:
        """Load the model in a new process and wait until it is ready. The process shows its progress on the terminal.

        Raises `ModelError`, `TokenizerError`, `ConfigError`; `EngineError` with what the process says is wrong.
        """
        start = time.perf_counter()
        process = _EngineProcess()  # it imports PyTorch while the small files are read here
        try:
            input_processor = await asyncio.to_thread(InputProcessor.load, config)
        except BaseException:
            process.end(kill=True)
            raise
        engine = cls(input_processor, process, config.stream_interval)
        try:
            process.send(Start(input_processor.local(config), input_processor.eos_token_ids))
            ready = await engine._ready
        except BaseException:
            engine.close()
            raise
        process.remove_sockets()
        engine.max_model_len, engine.stats = ready.max_model_len, ready.stats
        engine.num_blocks, engine.block_size = ready.num_blocks, ready.block_size
        engine.summary = f"{ready.summary} · ready in {time.perf_counter() - start:.1f} s"
        return engine

    max_model_len: int
    num_blocks: int
    block_size: int
    summary: str  # the start in one line

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

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

    async def prepare(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters checked, for `generate`: what in it may take a while, once for all answers to a request.

        `ValueError` when they cannot be used. Others go on meanwhile.
        """
        structured, prepare = sampling.structured_outputs, self._input_processor.prepare
        texts = () if sampling.checked else (sampling.bad_words or (), sampling.dry_sequence_breakers or ())
        if (structured is None or structured.compiled is not None) and sum(map(len, texts)) <= FEW_TEXTS:
            return prepare(sampling)
        if self._compile_threads is None:
            self._compile_threads = make_executor(COMPILE_THREADS)
        return await asyncio.wrap_future(self._compile_threads.submit(prepare, sampling))

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]:
        """The answer, as updates; the last one has a `finish_reason`. An embedding comes in one update.

        The engine begins at once, whether or not the answer is read yet. A slow reader gets fewer and longer updates.

        `ValueError`, at once, for a request that cannot run; `EngineDeadError` when the process is or gets lost.
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
        stream = self._streams[request_id] = _Stream(output, self._stream_interval, self._pace)
        self._process.send(Add(request))
        return _Updates(stream, lambda: self._forget(request_id, stream))

    def _forget(self, request_id: str, stream: _Stream) -> None:
        """The reader of the stream wants no more: end the request if it has not ended."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            if not stream.output.finished and not self.dead:
                self._process.send(Abort(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request: its reader gets what there is, with `finish_reason` "abort". Unknown ids are fine."""
        self._abort(request_id)

    def abort_all(self) -> None:
        """End every request, as `abort` does."""
        for request_id in list(self._streams):
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and not stream.output.finished and not self.dead:
            self._process.send(Abort(request_id))
            stream.add(EngineOutput(request_id, [], "abort"), time.monotonic())

    def close(self) -> None:
        """End the process; waits for it. Requests that still run get `EngineDeadError`."""
        if self._closed:
            return
        self._closed = True
        if self._compile_threads is not None:
            self._compile_threads.shutdown(wait=False, cancel_futures=True)
        if not self.dead:
            self._die("the engine was closed")
        self._reader.cancel()
        started = self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None
        self._process.end(kill=not started)

    async def _read(self) -> None:
        while True:
            match decode_event(await self._process.receive()):
                case Step(outputs, stats):
                    self.stats = stats
                    self._pace.seconds = len(self._streams) / UPDATES_PER_SECOND
                    deliver(outputs, self._streams, time.monotonic())
                case Ready() as ready:
                    self._ready.set_result(ready)
                case Failed(message):
                    self._ready.set_exception(EngineError(message))

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            _log.critical("what the engine process says cannot be understood", exc_info=error)
            self._die("what the engine process says cannot be understood")

    async def _exited(self, code: int) -> None:
        """The process has ended, and not because it was told to."""
        if self._closed:
            return
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (perhaps the machine ran out of memory)"
        else:
            how = f"ended with exit code {code}"
        self.dead = True
        await asyncio.sleep(DRAIN_SECONDS)
        if not self._ready.done():
            self._ready.set_exception(EngineError(f"the engine process {how} while starting"))
        elif not self._closed:
            _log.critical("the engine process %s", how)
            self._die(f"the engine process {how}")

    def _die(self, how: str) -> None:
        self.dead, self.death = True, how
        for stream in self._streams.values():
            stream.close(how)

    def _check_alive(self) -> None:
        if self.dead:
            raise EngineDeadError(self.death or "the engine process is gone")


@dataclass(slots=True)
class _Pace:
    """Seconds between two updates of a stream, the same for all: longer, the more streams there are."""

    seconds: float = 0.0


class _Stream:
    """An `OutputCollector` that one task can wait for."""

    def __init__(self, output: OutputCollector, interval: int, pace: _Pace) -> None:
        """`interval`: tokens per update, after the first token and unless it carries more than tokens."""
        self.output = output
        self.ready = False  # there is something to take
        self._interval, self._pace, self._num_held = interval, pace, 0
        self._latest = 0.0  # when tokens last made it ready
        self._death: str | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

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


class _EngineProcess:
    """The child process, its two sockets and its lifeline."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="quire-")  # only this user may enter it
        commands, events = (f"ipc://{self._folder}/{name}" for name in ("commands", "events"))
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._events = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        for socket in (self._commands, self._events):
            socket.set_hwm(0)
            socket.linger = 0
        self._commands.reconnect_ivl = 10  # milliseconds between tries until the child listens
        self._commands.connect(commands)
        self._events.bind(events)
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", ENGINE_MODULE, commands, events],
            stdin=subprocess.PIPE,
            process_group=0,  # a terminal's Ctrl-C is for the parent, even before the child can ignore it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, command: Command) -> None:
        self._commands.send(encode(command), zmq.NOBLOCK)

    async def receive(self) -> bytes:
        return await self._events.recv()

    def on_exit(self, callback: Any) -> None:
        """Run the coroutine function `callback(exit code)` in this event loop when the process has ended."""
        loop = asyncio.get_running_loop()

        def watch() -> None:
            code = self._popen.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its callers are gone
                loop.call_soon_threadsafe(lambda: tasks.add(loop.create_task(callback(code))))

        tasks: set[asyncio.Task[None]] = set()
        threading.Thread(target=watch, name="engine process watch", daemon=True).start()

    def remove_sockets(self) -> None:
        """Both sides are connected: their names in the file system are not needed any more, whatever happens."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def end(self, kill: bool) -> None:
        if kill:
            self._popen.kill()
        else:
            self.send(Shutdown())
        try:
            self._popen.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._commands.close()
        self._events.close()
        self._context.term()
        self.remove_sockets()
