"""The engine of another process, as an API process beside that one uses it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from engine.core.batch import SchedulerStats, StepOutputs
from engine.core.engine_request import Adapter, EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.errors import EngineAsleepError, EngineDeadError, ParameterError
from engine.processing.input_processor import InputProcessor
from engine.processing.model_info import ModelInfo
from engine.processing.output_collector import OutputCollector, RequestUpdate, deliver
from engine.processing.preparation import Preparation
from engine.replicas.facts import EngineFacts, EngineStatus
from engine.replicas.messages import Abort, Add
from engine.replicas.replica import Replica
from engine.replicas.state import EngineState, StateBoard
from engine.replicas.stream_table import StreamTable
from engine.replicas.streams import RunningStream


class _Sender:
    """Sends requests to the engine's process. In a `StreamTable` it stands for the dispatcher."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self.streams: dict[str, RunningStream] = {}

    def assign(self, stream: RunningStream) -> None:
        self.streams[stream.request.request_id] = stream
        self._send(Add(stream.request))

    def remove(self, stream: RunningStream) -> None:
        request_id = stream.request.request_id
        if self.streams.pop(request_id, None) is not None and not stream.output.finished:
            self._send(Abort(request_id))

    def ended(self, stream: RunningStream) -> None:
        self.streams.pop(stream.request.request_id, None)


class RemoteEngine:
    """An engine with the methods that a server calls, see `AsyncEngine`. Bound to an event loop."""

    replicas: Sequence[Replica] = ()  # the engine's process counts what they do
    stats: SchedulerStats | None = None
    max_loras = 0

    def __init__(
        self,
        facts: EngineFacts,
        processor: InputProcessor,
        status: EngineStatus,
        send: Callable[[Any], None],
        call: Callable[..., Awaitable[Any]],
    ) -> None:
        """`send`: sends a message to the engine's process. `call`: calls a method of its engine, by name."""
        self.max_num_seqs, self.num_blocks, self.block_size = facts.max_num_seqs, facts.num_blocks, facts.block_size
        self._processor = processor.of_engine(facts.max_model_len, facts.fingerprint)
        self._preparation = Preparation()
        self._call, self._status = call, status
        self._board = StateBoard()
        self._sender = _Sender(send)
        self._streams = StreamTable(self._sender, facts.config.stream_interval)
        self.in_flight = self._streams.in_flight
        self.update(status)

    @property
    def model(self) -> ModelInfo:
        return self._processor.info

    @property
    def state(self) -> EngineState:
        return self._board.state

    async def state_change(self, seen: EngineState) -> EngineState:
        return await self._board.change(seen)

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    async def prepare(self, sampling: SamplingParams, tenant: str = "") -> SamplingParams:
        """See `AsyncEngine.prepare`."""
        return await self._preparation.run(self._processor.prepare, sampling, tenant)

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]:
        """See `AsyncEngine.generate`. What the engine's process refuses later ends with `EngineDeadError`."""
        if request.sampling.n != 1:
            raise ParameterError("n", f"must be 1 for one answer, got {request.sampling.n}")
        request = self._processor.check(request)
        if self.state.phase == "dead":
            raise EngineDeadError(self.state.reason)
        if self._status.refusal:
            raise EngineAsleepError(self._status.refusal)
        return self._streams.open(
            request, OutputCollector(request.prompt_token_ids, request.sampling, self.model.tokenizer)
        )

    async def abort(self, request_id: str) -> None:
        self._streams.end_early(request_id, "abort")

    def abort_all(self) -> None:
        self._streams.end_all("abort")

    def close(self) -> None:
        self._preparation.close()

    # ---- messages of the engine's process ----

    def update(self, status: EngineStatus) -> None:
        """The engine's status has changed."""
        self._status = status
        self._board.show(status.state)

    def deliver(self, outputs: StepOutputs) -> None:
        """Requests have new outputs."""
        streams = self._sender.streams
        deliver(outputs, streams, time.monotonic())
        for output in outputs.outputs:
            if output.finish_reason is not None and (stream := streams.get(output.request_id)) is not None:
                self._streams.ended(stream)

    def lost(self, request_id: str, reason: str) -> None:
        """A request gets no more output."""
        if (stream := self._sender.streams.get(request_id)) is not None:
            self._streams.ended(stream)
            stream.close(reason)

    # ---- methods of the engine in its process ----

    @property
    def is_sleeping(self) -> bool:
        return self.state.phase == "asleep"

    @property
    def weights_path(self) -> str:
        return self._status.weights_path

    @property
    def weights_version(self) -> int:
        return self._status.weights_version

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._call("reset_prefix_cache"))

    async def load_adapter(self, name: str, path: str) -> Adapter:
        return msgspec.convert(await self._call("load_adapter", name=name, path=path), Adapter)

    async def sleep(self, level: int = 1, *, abort: bool = False) -> None:
        await self._call("sleep", level=level, abort=abort)

    async def wake_up(self) -> None:
        await self._call("wake_up")

    async def update_weights(self, path: str, *, abort: bool = False) -> None:
        await self._call("update_weights", path=path, abort=abort)


METHODS = ("reset_prefix_cache", "load_adapter", "sleep", "wake_up", "update_weights")  # that a `RemoteEngine` calls
