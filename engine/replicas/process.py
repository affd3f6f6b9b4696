"""The engine process: receives commands, and sends one message per step.

Started by `python -m engine.replicas.process_main COMMANDS EVENTS HEARTBEAT`: the addresses of two sockets, and a file.
Its standard input is its lifeline: it closes when the parent ends for any reason, and then this process exits at once.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import zmq

from engine.core.batch import SchedulerStats, StepOutputs
from engine.core.engine_request import EngineRequest
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.models.errors import ModelError
from engine.models.files import Progress, silent
from engine.processing.fingerprint import system_fingerprint
from engine.replicas.heartbeat import Heartbeat
from engine.replicas.messages import (
    Abort,
    Add,
    Call,
    Event,
    Failed,
    Ready,
    Reply,
    Shutdown,
    Start,
    Starting,
    Step,
    decode_commands,
    encode,
)
from engine.stats import ExpertTokens
from engine.stepping.recovery import client_reason, failed_output, refused_output
from engine.utils.log import configure_logging, debugging
from engine.utils.progress import TerminalProgress
from engine.worker.parallel.cores import keep_to_one_node
from engine.worker.parallel.lifeline import end_with_parent

_log = logging.getLogger(__name__)

IDLE_MILLISECONDS = 500  # between heartbeats without work
# Methods of the engine for `Call`. The loop waits for them: a result that takes time
# beside steps is a `Future`.
METHODS = frozenset(["reset_prefix_cache", "load_adapter", "sleep", "wake_up", "update_weights"])
PROGRESS_SECONDS = 0.1  # least time between progress messages about a phase of the start


class Steppable(Protocol):
    """The interface of the engine that the loop uses."""

    expert_tokens: ExpertTokens

    def add_request(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def has_work(self) -> bool: ...
    def step(self) -> StepOutputs: ...
    def idle(self) -> bool: ...
    def reset_prefix_cache(self) -> bool: ...
    def load_adapter(self, name: str, path: str, version: str) -> Future[str]: ...
    def sleep(self, level: int) -> None: ...
    def wake_up(self) -> None: ...
    def update_weights(self, path: str, overlays: Sequence[str]) -> None: ...
    def stats(self) -> SchedulerStats: ...


class EngineLoop:
    """In each iteration, processes all waiting commands, runs one step and sends its outputs. Sleeps when idle."""

    def __init__(
        self, engine: Steppable, commands: zmq.Socket[bytes], events: zmq.Socket[bytes], beat: Callable[[], None]
    ) -> None:
        """`beat`: called for each step, and every `IDLE_MILLISECONDS` without work."""
        self._engine, self._commands, self._events, self._beat = engine, commands, events, beat
        self._last_stats: SchedulerStats | None = None
        self._pending: dict[int, Future[Any]] = {}  # results of calls that are not known yet

    def run(self) -> None:
        """Run until `Shutdown`. After an exception the engine is unusable."""
        while self.run_once():
            pass

    def run_once(self) -> bool:
        """Process commands, run a step and send its message. Returns False after `Shutdown`."""
        self._beat()
        if not self._take_commands():
            return False
        self._publish(self._engine.step() if self._engine.has_work() else StepOutputs())
        return True

    def _take_commands(self) -> bool:
        while not self._engine.has_work():
            wait = 1 if self._engine.idle() or self._pending else IDLE_MILLISECONDS
            if self._commands.poll(wait):
                break
            self._beat()
            self._reply_to_pending()
        self._reply_to_pending()
        while True:
            try:
                message = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            for command in decode_commands(message):
                match command:
                    case Add(request):
                        self._add(request)
                    case Abort(request_id):
                        self._engine.abort(request_id)
                    case Call() as call:
                        if (reply := self._called(call)) is not None:
                            self._events.send(encode(reply))
                    case Shutdown():
                        return False
                    case unexpected:
                        raise AssertionError(f"{unexpected!r} after the start")

    def _add(self, request: EngineRequest) -> None:
        request_id = request.request_id
        try:
            self._engine.add_request(request)
        except Exception as error:
            # The API process checks requests first, so a `ValueError` is about this engine's memory. Others are bugs.
            if isinstance(error, ValueError):
                output = refused_output(request_id, str(error))
            else:
                self._engine.abort(request_id)
                output = failed_output(request_id, client_reason(error), exc_info=True)
            self._publish(StepOutputs(outputs=[output]))

    def _reply_to_pending(self) -> None:
        """Send the results of calls that are known by now."""
        for call_id, result in list(self._pending.items()):
            if result.done():
                del self._pending[call_id]
                error = result.exception()
                reply = Reply(call_id, result.result()) if error is None else Reply(call_id, error=_described(error))
                self._events.send(encode(reply))

    def _called(self, call: Call) -> Reply | None:
        """Call a method of the engine between two steps. Returns None if its result will be known later."""
        try:
            if call.method not in METHODS:
                raise ValueError(f"the engine has no method {call.method!r}")
            result = getattr(self._engine, call.method)(**call.arguments)
            if isinstance(result, Future):
                self._pending[call.id] = result
                return None
            return Reply(call.id, result)
        except Exception as error:
            _log.error("the call of %s failed", call.method, exc_info=True)
            return Reply(call.id, error=str(error) if isinstance(error, EngineError) else _described(error))

    def _publish(self, outputs: StepOutputs) -> None:
        stats = self._engine.stats()
        if outputs or stats != self._last_stats:
            self._last_stats = stats
            self._events.send(encode(Step(outputs, stats, self._engine.expert_tokens.take())))


def main(build: Callable[..., Any] = Engine) -> None:
    """Run until `Shutdown`. Exits with 1 if the engine cannot start or a step fails. `build`: creates the engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and sends Shutdown
    end_with_parent()
    configure_logging()
    heartbeat = Heartbeat(Path(sys.argv[3]))  # open it before sending `Ready`: the parent then removes the file
    with zmq.Context() as context, context.socket(zmq.PULL) as commands, context.socket(zmq.PUSH) as events:
        for socket in (commands, events):
            socket.set_hwm(0)  # queued messages are bounded by the tokens of the running requests
        commands.bind(sys.argv[1])
        events.connect(sys.argv[2])
        events.linger = 1000
        (start,) = decode_commands(commands.recv())
        assert isinstance(start, Start)
        build = partial(build, lost=heartbeat.end_because)
        engine, answer = _start(start, build, _Progress(events))
        events.send(encode(answer))
        if engine is None:
            sys.exit(1)
        try:
            EngineLoop(engine, commands, events, heartbeat.beat).run()
        except Exception as error:
            _log.critical("a step failed, the engine stops", exc_info=True)
            events.send(encode(Failed(f"a step failed: {_described(error)}")))
            sys.exit(1)
        engine.close()


class _Progress:
    """Shows the progress of the start on the terminal and sends it to the parent."""

    def __init__(self, events: zmq.Socket[bytes]) -> None:
        self._events, self._terminal = events, TerminalProgress()
        self._phase, self._sent = "", 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        self._terminal(phase, done, total)
        now = time.monotonic()
        if phase != self._phase or now - self._sent > PROGRESS_SECONDS:
            self._phase, self._sent = phase, now
            self._events.send(encode(Starting(phase, done, total)))


def _start(start: Start, build: Callable[..., Any], progress: Progress = silent) -> tuple[Any, Event]:
    if start.config.device == "cpu" or not torch.cuda.is_available():
        keep_to_one_node(start.replica)
    try:
        engine = build(start.config, eos_token_ids=start.eos_token_ids, progress=progress)
    except Exception as error:
        if debugging():
            _log.exception("the engine cannot start")
        if isinstance(error, (ConfigError, EngineError, ModelError)):
            return None, Failed(str(error))
        return None, Failed(f"{_described(error)} (QUIRE_LOG_LEVEL=debug logs the traceback)")
    gc.collect()
    gc.freeze()  # the garbage collector need not scan what is loaded by now
    runner = engine.runner
    max_num_seqs = engine.options.max_num_seqs
    fingerprint = system_fingerprint(start.config, Path(start.config.model))
    numbers = runner.num_blocks, runner.block_size, runner.max_model_len, max_num_seqs
    ready = Ready(*numbers, engine.stats(), engine.summary(), fingerprint)
    return engine, ready


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
