"""Beam search for the server: a request's answers are the best beams, returned when the search ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from engine import BeamSearchParams, EngineRequest, RequestUpdate, SamplingParams
from engine.core.batch import EngineOutput
from engine.processing.beam_search import MAX_BEAM_WIDTH, Beam, BeamSearch
from engine.processing.output_collector import OutputCollector
from server.generation.engine_client import EngineClient
from server.generation.errors import InvalidRequestError
from server.generation.model import Model
from server.generation.request import GenerationRequest
from server.generation.warnings import Warnings

# The sampling parameters that a beam search uses. It scores beams by the model's unmodified probabilities.
_HEEDED = frozenset(
    ["n", "max_tokens", "ignore_eos", "stop_token_ids", "logprobs", "skip_special_tokens", "include_stop_str_in_output"]
)


async def beam_searches(
    model: Model, request: GenerationRequest, sampling: SamplingParams, warnings: Warnings
) -> BeamSearches:
    """Prepare the searches of a request with a `length_penalty`.

    Adds to `warnings` the parameters that a beam search ignores. Raises `RequestError` for unsupported parameters.
    """
    width = sampling.n
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequestError(f"must be at most {MAX_BEAM_WIDTH} in a beam search, got {width}", "n")
    if request.structured_outputs or request.tool_mode != "none":
        field = "structured_outputs" if request.structured_outputs else "tools"
        raise InvalidRequestError("cannot be given together with use_beam_search", field)
    if sampling.prompt_logprobs is not None:
        raise InvalidRequestError("cannot be given together with use_beam_search", "prompt_logprobs")
    for name, value in request.sampling.items():
        if name not in _HEEDED and value != getattr(_PLAIN, name):
            warnings.add("has no effect in a beam search", name)
    params = BeamSearchParams(beam_width=width, max_tokens=1)
    try:
        step = await model.engine.prepare(params.step_sampling(sampling.logprobs or 0), request.tenant)
    except ValueError as error:
        raise InvalidRequestError(
            f"{width} beams need more log probabilities than the server gives: {error}", "n"
        ) from None
    ends = {*model.info.eos_token_ids, *(sampling.stop_token_ids or ())}
    return BeamSearches(model.engine, step, width, request.length_penalty or 0.0, ends)


_PLAIN = SamplingParams(temperature=0)


class BeamSearches:
    """The searches of one request. Each search has `width` beams and gives `width` consecutive answers."""

    def __init__(
        self,
        engine: EngineClient,
        step: SamplingParams,
        width: int,
        length_penalty: float,
        end_token_ids: Collection[int],
    ) -> None:
        """`step`: prepared sampling parameters of one-token requests. `end_token_ids`: tokens that end an answer."""
        self._engine, self._step, self._width = engine, step, width
        self._length_penalty, self._end_token_ids = length_penalty, end_token_ids
        self._search: _Search | None = None  # the search that receives the next answers

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]:
        """Return the updates of one answer: a single update with the whole answer.

        The first answer of a search starts the engine request. Raises `ValueError` like `EngineClient.generate`.
        """
        if self._search is None or len(self._search.answers) == self._width:
            sampling = request.sampling
            params = BeamSearchParams(
                beam_width=self._width, max_tokens=sampling.max_tokens or 1, ignore_eos=sampling.ignore_eos,
                length_penalty=self._length_penalty,
            )  # fmt: skip
            search = BeamSearch(len(request.prompt_token_ids), params, self._end_token_ids)
            self._search = _Search(self._engine, search, self._step, request)
        return self._search.add(request)


class _Search:
    """The search for one prompt's answers. Its engine requests have the answers' ids: aborting those ends it."""

    def __init__(self, engine: EngineClient, search: BeamSearch, step: SamplingParams, request: EngineRequest) -> None:
        self._engine, self._search, self._step = engine, search, step
        self._prompt = request.prompt_token_ids
        self._done = asyncio.Event()
        self._last: RequestUpdate | None = None  # the update that ended the search early
        self._first: RequestUpdate | None = None
        self.answers: list[EngineRequest] = []
        self._begun = engine.generate(replace(request, sampling=step))

    def add(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]:
        shown = request.sampling.clone(stop=None)  # a beam search ignores stop strings
        collector = OutputCollector(self._prompt, shown, self._engine.model.tokenizer)
        self.answers.append(request)
        return self._answer(len(self.answers) - 1, collector)

    async def _answer(self, index: int, collector: OutputCollector) -> AsyncGenerator[RequestUpdate, None]:
        """The consumer of the first answer runs the search; the other answers of the request wait for it."""
        if index == 0:
            await self._run()
            self._done.set()
        await self._done.wait()
        collector.add(self._output(index, self.answers[index].sampling), time.monotonic())
        yield collector.take()

    async def _run(self) -> None:
        while not self._search.is_over:
            async with AsyncExitStack() as stack:
                started = []
                for request, beam in zip(self.answers, self._search.beams, strict=False):
                    updates = self._begun if self._first is None else self._next(request, beam)
                    started.append(await stack.enter_async_context(aclosing(updates)))
                found = []
                for updates in started:
                    async for update in updates:
                        self._first = self._first or update
                        if update.logprobs is None:
                            self._last = update
                            return
                        found += update.logprobs
            self._search.advance(found)

    def _next(self, request: EngineRequest, beam: Beam) -> AsyncGenerator[RequestUpdate, None]:
        tokens = self._prompt + beam.token_ids
        names = None if request.name_ids is None else request.name_ids + beam.token_ids
        return self._engine.generate(replace(request, prompt_token_ids=tokens, name_ids=names, sampling=self._step))

    def _output(self, index: int, sampling: SamplingParams) -> EngineOutput:
        found, first, last = self._search.best(), self._first, self._last
        beam = found[index] if index < len(found) else Beam()
        assert first is not None
        ended = beam.finish_reason == "stop"
        output = EngineOutput(self.answers[index].request_id, beam.token_ids, beam.finish_reason)
        if ended and beam.token_ids[-1] in (sampling.stop_token_ids or ()):
            output.stop_reason = beam.token_ids[-1]
        if last is not None and not ended:
            output.finish_reason, output.error, output.is_refused = last.finish_reason, last.error, last.is_refused
        if sampling.logprobs is not None:
            most = sampling.logprobs
            output.logprobs = [
                replace(at, top_ids=at.top_ids[:most], top_logprobs=at.top_logprobs[:most]) for at in beam.logprobs
            ]
        output.num_cached_tokens = first.num_cached_tokens
        output.queued_time, output.scheduled_time = first.timings.queued_ts, first.timings.scheduled_ts
        return output
