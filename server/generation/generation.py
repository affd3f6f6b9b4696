"""One request's answers while they are generated: samples, their updates as events, usage.

A request for `n` answers to each of several prompts has `n` × prompts samples. Each is a separate engine request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from engine import EngineDeadError, RequestMetrics, RequestUpdate, SamplingParams
from server.generation.errors import ConflictError, EngineFailedError, InvalidRequestError, TimedOutError
from server.generation.usage import Usage
from server.generation.visible_stops import StoppingReader
from server.metrics import Metrics, SampleWatch
from server.observability.requests import RequestLog, RequestRecord
from server.parsing.answer import AnswerReader
from server.parsing.pieces import Piece

TIMEOUT = "timeout"  # the engine's finish reason for a request that passed its deadline
_READ_AT_ONCE = 32  # updates read before yielding to the event loop: about a millisecond
TOOL_CALLS = "tool_calls"  # the finish reason of an answer that ends with calls
_NO_PIECES: list[Piece] = []


@dataclass(slots=True)
class Sample:
    """One answer that is being generated, or one embedding that is being computed."""

    request_id: str  # in the engine
    index: int  # of the choice in the response
    prompt_index: int
    sampling: SamplingParams
    updates: AsyncGenerator[RequestUpdate, None]
    watch: SampleWatch
    reader: AnswerReader | None  # None: the text is not parsed
    num_reasoning_tokens: int = 0

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop string in visible text ended the output, which the engine may still compute."""
        return isinstance(self.reader, StoppingReader) and self.reader.stopped_by is not None

    def read(self, update: RequestUpdate) -> list[Piece]:
        """Return the pieces that an update adds. A stop string among them ends the answer with this update."""
        reader = self.reader
        if reader is None:
            return _NO_PIECES
        finished = update.finish_reason is not None
        pieces = reader.push(update.text, update.token_ids, finished, finished and update.finish_reason != "stop")
        if isinstance(reader, StoppingReader) and reader.stopped_by is not None:
            update.finish_reason, update.stop_reason = "stop", reader.stopped_by
        return pieces

    def finish_reason(self, update: RequestUpdate) -> str | None:
        """Return the engine's finish reason, but `TOOL_CALLS` after calls, and "length" if a stop token cut a call."""
        if update.finish_reason != "stop" or self.reader is None:
            return update.finish_reason
        if self.reader.is_cut:
            return "length"
        return TOOL_CALLS if self.reader.has_calls else "stop"


# A sample, its update, and the pieces (content, reasoning, tool calls) that the update adds. Empty without a reader.
Event = tuple[Sample, RequestUpdate, list[Piece]]


@dataclass(slots=True)
class Generation:
    """All samples of one request. `events` can be iterated only once."""

    id: str  # unique among the owner's requests
    owner: str  # name of the API key that sent the request
    tenant: str  # for fairness
    created: int
    model: str
    role: str  # of the generated messages
    n: int
    prompts: list[list[int]]
    samples: list[Sample]
    usage: Usage
    record: RequestRecord
    metrics: Metrics
    log: RequestLog
    running: dict[tuple[str, str], Generation]  # running requests by owner and id
    ended: list[Callable[[], None]]  # called when all samples have finished
    fingerprint: str = ""  # `system_fingerprint` of the answer; "": it has none
    timings: RequestMetrics | None = field(init=False, default=None)  # of the first sample
    _ended: set[int] = field(init=False, default_factory=set)  # indexes of finished samples

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the engine's updates of all samples until all have finished. Closing the generator aborts the samples.

        A slow consumer gets fewer, longer updates. Raises `RequestError` when the engine fails.
        """
        key = (self.owner, self.id)
        if self.running.setdefault(key, self) is not self:
            raise already_running(self.id)
        self.log.begin(self.record)
        try:
            if len(self.samples) == 1:
                (sample,) = self.samples
                async with aclosing(sample.updates) as updates:
                    async for update in updates:
                        yield self._event(sample, update)
                        if sample.is_stopped:
                            break
            else:
                async with aclosing(self._merged()) as merged:
                    async for sample, update in merged:
                        yield self._event(sample, update)
        except EngineDeadError as error:
            raise EngineFailedError(f"the engine stopped before the answer was complete: {error}") from None
        finally:
            del self.running[key]
            for sample in self.samples:
                if sample.index not in self._ended:
                    sample.watch.abandoned()
            self.log.end(self.record)
            for call in self.ended:
                call()
        for first in range(0, len(self.samples), self.n):
            watches = [sample.watch for sample in self.samples[first : first + self.n]]
            if watches[0].generates:
                self.metrics.request_ended(self.n, max(watch.num_tokens for watch in watches))

    async def embeddings(self) -> list[bytes]:
        """Return the embedding of each sample, as float32 bytes; call it instead of `events`.

        Raises `RequestError` when a sample was aborted.
        """
        found = [b""] * len(self.samples)
        async with aclosing(self.events()) as events:
            async for sample, update, _ in events:
                if update.embedding is None:
                    raise ConflictError("the request was aborted")
                found[sample.index] = update.embedding
        return found

    def _event(self, sample: Sample, update: RequestUpdate) -> Event:
        pieces = sample.read(update)
        sample.watch.observe(update)
        usage = self.usage
        usage.completion_tokens += len(update.token_ids)
        if sample.index == 0:
            self.timings = update.timings
        if update.finish_reason is not None:
            self._observe_end(sample, update)
        if (reader := sample.reader) is not None and usage.reasoning_tokens is not None:
            before = sample.num_reasoning_tokens
            sample.num_reasoning_tokens = reader.num_reasoning_tokens
            usage.reasoning_tokens += sample.num_reasoning_tokens - before
        return sample, update, pieces

    def _observe_end(self, sample: Sample, update: RequestUpdate) -> None:
        self._ended.add(sample.index)
        if sample.index % self.n == 0:  # the other samples share the first one's prompt
            self.usage.cached_tokens += update.num_cached_tokens
        if (predicted := self.usage.predicted_tokens) is not None:
            accepted, rejected = update.timings.num_predicted
            self.usage.predicted_tokens = predicted[0] + accepted, predicted[1] + rejected
        if update.finish_reason == "error":
            if update.is_refused:
                raise InvalidRequestError(f"the answer cannot be completed: {update.error}")
            raise EngineFailedError(f"the engine failed on this request: {update.error}")
        if update.finish_reason == TIMEOUT:
            if not self.usage.completion_tokens:
                raise too_late()
            update.finish_reason, update.stop_reason = "abort", TIMEOUT

    async def _merged(self) -> AsyncGenerator[tuple[Sample, RequestUpdate], None]:
        queue: asyncio.Queue[tuple[Sample, RequestUpdate | None] | BaseException] = asyncio.Queue(len(self.samples))
        tasks = [asyncio.create_task(_feed(queue, sample)) for sample in self.samples]
        try:
            unfinished, num_read = {sample.index for sample in self.samples}, 0
            while unfinished:
                num_read += 1
                if num_read % _READ_AT_ONCE == 0:  # `get` on a non-empty queue does not yield to the event loop
                    await asyncio.sleep(0)
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                sample, update = item
                if update is None or sample.index not in unfinished:
                    unfinished.discard(sample.index)
                    continue
                yield sample, update
                if sample.is_stopped:
                    unfinished.discard(sample.index)
                    tasks[sample.index].cancel()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(queue: asyncio.Queue[tuple[Sample, RequestUpdate | None] | BaseException], sample: Sample) -> None:
    try:
        async with aclosing(sample.updates) as updates:
            async for update in updates:
                await queue.put((sample, update))
        await queue.put((sample, None))
    except Exception as error:
        await queue.put(error)


def too_late() -> TimedOutError:
    return TimedOutError("the request timed out before the answer began", "timeout_ms")


def already_running(generation_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"a request with the id {generation_id} is already running: choose another id", "request_id"
    )
