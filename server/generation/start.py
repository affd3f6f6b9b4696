"""Turns API requests into engine requests: checks, sampling parameters, prompts and samples."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from engine import (
    EngineAsleepError,
    EngineDeadError,
    EngineRequest,
    ParameterError,
    PoolingParams,
    RequestUpdate,
    SamplingParams,
)
from engine.core.params.pooling import UNSAMPLED
from engine.processing.output_collector import with_samples
from engine.vision.loader import PromptWithImages
from server.generation.beam_search import beam_searches
from server.generation.caller import Caller
from server.generation.checks import (
    check_num_samples,
    check_priority,
    check_prompts,
    check_stop,
    check_tools,
    warn_of_changes,
    warn_of_short_outputs,
    warn_of_unused_variables,
    with_sound_tools,
)
from server.generation.conversation import Prompt
from server.generation.errors import InvalidRequestError, UnavailableError, invalid, spelled
from server.generation.generation import Generation, Sample, already_running, too_late
from server.generation.model import Model
from server.generation.request import Conversation, EmbeddingRequest, GenerationRequest, PromptRequest
from server.generation.sampling import completed, given_values, limited
from server.generation.server_state import ServerState
from server.generation.usage import Usage
from server.generation.visible_stops import at_visible_stops
from server.generation.warnings import Warnings
from server.observability.recorder import Ended
from server.observability.requests import arrival, new_record
from server.parsing.answer import AnswerReader, MarkedReader, TokenCounter
from server.parsing.harmony import HarmonyReader
from server.parsing.reasoning import ReasoningReader
from server.parsing.tools import ToolReader

_log = logging.getLogger(__name__)
Updates = AsyncGenerator[RequestUpdate, None]
BeginOne = Callable[[EngineRequest], Updates]
_BEGUN_AT_ONCE = 8  # samples started before yielding to the event loop: about a millisecond


async def generate(server: ServerState, request: GenerationRequest, warnings: Warnings, caller: Caller) -> Generation:
    """Check a request and start its samples. Raises `RequestError`, which uses the field names of the request's API."""
    model, warnings = server.model, warnings.named(request.names)
    with spelled(request.names):
        request = request.of(caller, arrival())
        async with _in_time(request):
            await model.adapters.resolve(request.model, caller)
        model.check_name(request.model, caller)
        if not model.info.generates or model.adapters.classifier(request.model) is not None:
            raise InvalidRequestError(_no_generation(model, request.model), "model", lead=None)
        check_priority(request, caller)
        check_stop(request)
        sampling = given_values(model, request)
        check_num_samples(request, sampling.n)
        async with server.queue.admitted(request.num_prompts * sampling.n, request.tenant), _in_time(request):
            return await _generate(server, request, caller, sampling, warnings)


async def _generate(
    server: ServerState, request: GenerationRequest, caller: Caller, sampling: SamplingParams, warnings: Warnings
) -> Generation:
    model = server.model
    if request.conversation is not None:
        request.conversation.check()
        if request.conversation.tools:  # schemas may be large
            request = await model.in_thread(with_sound_tools, request, warnings, tenant=request.tenant)
    chat = model.chats.of(request)
    check_tools(server.settings, request, chat, warnings)
    warn_of_unused_variables(request, chat, warnings)
    prompts = await model.encode(request)
    warn_of_changes(prompts[0], warnings)
    sampling = await completed(model, request, prompts[0], sampling, warnings)
    token_ids = [model.truncated(prompt, request, sampling.max_tokens or 1) for prompt in prompts]
    check_prompts(model, token_ids, 1)
    warn_of_short_outputs(model, request, token_ids, warnings)
    asked = [(prompt, each) for prompt in token_ids for each in with_samples(limited(model, prompt, sampling))]
    begin_one: BeginOne = model.engine.generate
    if request.length_penalty is not None:
        begin_one = (await beam_searches(model, request, sampling, warnings)).generate
        asked = [(prompt, each.clone(stop=None)) for prompt, each in asked]
    if (images := prompts[0].images) is not None:
        begin_one = partial(_with_images, begin_one, images)
    new_reader = partial(_reader, model, request, prompts[0]) if request.conversation is not None else None
    generation = await _begin(server, request, caller, token_ids, asked, begin_one, new_reader=new_reader)
    if images is not None:
        generation.record.num_images = len(images.images)
        generation.record.image_tokens = sum(image.num_tokens for image in images.images)
    return generation


def _with_images(begin_one: BeginOne, prompt: PromptWithImages, request: EngineRequest) -> Updates:
    return begin_one(dataclasses.replace(request, name_ids=prompt.name_ids, images=prompt.images))


def _no_generation(model: Model, name: str | None) -> str:
    classifier = model.adapters.classifier(name)
    kind, path = "embeddings", "v1/embeddings"
    if classifier is not None:
        kind, path = "classification", "pooling" if classifier.labels_tokens else "v1/classify"
    return f"The model `{name or model.names[0]}` is published for {kind} and generates no text. Use /{path}."


async def embed(server: ServerState, request: EmbeddingRequest, caller: Caller) -> Generation:
    """Check a request and start its embeddings. Each prompt has one sample with one update."""
    model, classifier = server.model, server.model.info.classifier
    with spelled(request.names):
        request = request.of(caller, arrival())
        async with _in_time(request):
            await model.adapters.resolve(request.model, caller)
        model.check_name(request.model, caller)
        check_priority(request, caller)
        if classifier is not None and classifier.is_in_worker and not request.wants_logits:
            path = "pooling" if classifier.labels_tokens else "v1/classify"
            reason = f"The model `{model.names[0]}` is published for classification. Use /{path}."
            raise InvalidRequestError(reason, "model", lead=None)
        try:
            defaults = {"pooling": model.info.default_pooling, "normalize": model.info.default_normalize}
            pooling = PoolingParams(**{**defaults, **request.pooling})
            request = _with_prompt(model, request)
        except ValueError as error:
            raise invalid(error) from None
        check_num_samples(request, 1)
        async with server.queue.admitted(request.num_prompts, request.tenant), _in_time(request):
            prompts = await model.encode(request)
            token_ids = [model.truncated(prompt, request, 0) for prompt in prompts]
            check_prompts(model, token_ids, 0)
            asked = [(prompt, UNSAMPLED) for prompt in token_ids]
            return await _begin(server, request, caller, token_ids, asked, model.engine.generate, pooling=pooling)


def _with_prompt(model: Model, request: EmbeddingRequest) -> EmbeddingRequest:
    """Put the model's prompt of the requested name before texts. Raises `ParameterError` for an unknown name."""
    if request.prompt_name is None and not request.has_default_prompt:
        return request
    try:
        prefix = model.info.prompts.prefix(request.prompt_name)
    except ValueError as error:
        raise ParameterError("prompt_name", str(error)) from None
    if not prefix or not isinstance(request.prompt, list):
        return request
    prompts: Any = [prefix + each if isinstance(each, str) else each for each in request.prompt]
    return dataclasses.replace(request, prompt=prompts)


@asynccontextmanager
async def _in_time(request: PromptRequest) -> AsyncIterator[None]:
    """Prepare a request for the engine in the block. Raises `TimedOutError` when its deadline passes before the end.

    From then on the engine watches the deadline.
    """
    seconds = request.deadline - time.monotonic() if request.deadline else None
    if seconds is not None and seconds <= 0:
        raise too_late()
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise too_late() from None


async def _begin(
    server: ServerState,
    request: PromptRequest,
    caller: Caller,
    prompts: list[list[int]],
    asked: list[tuple[list[int], SamplingParams]],
    begin_one: BeginOne,
    *,
    pooling: PoolingParams | None = None,
    new_reader: Callable[[], AnswerReader] | None = None,
) -> Generation:
    """Start the samples with `begin_one`. `asked` has the same number for each prompt; `new_reader` creates a parser.

    Yields to the event loop in between. On an error or cancellation, the samples already started end.
    """
    model = server.model
    unique = uuid.uuid4().hex
    public_id = f"{request.id_prefix}{request.request_id or unique}"
    if (caller.name, public_id) in server.running:
        raise already_running(public_id)
    engine_id = f"{public_id}-{unique}" if request.request_id else public_id
    n = len(asked) // len(prompts)
    samples: list[Sample] = []
    adapter = model.adapters.find(request.model)
    with _refusals():
        for index, (prompt, sampling) in enumerate(asked):
            if index % _BEGUN_AT_ONCE == _BEGUN_AT_ONCE - 1:
                await asyncio.sleep(0)
            sample_id = f"{engine_id}-{index}" if len(asked) > 1 else engine_id
            watch = server.metrics.watch(len(prompt), sampling)
            reader = new_reader() if new_reader is not None else None
            has_stops = bool(sampling.stop_strings) and reader is not None and not reader.is_plain
            asked_of_engine = sampling.clone(stop=None, detokenize=False) if has_stops else sampling
            one = EngineRequest(
                sample_id, prompt, asked_of_engine, pooling,
                request.cache_salt, request.priority, request.tenant, request.deadline, request.arrival,
                adapter=adapter,
            )  # fmt: skip
            updates = begin_one(one)
            if has_stops and reader is not None:
                updates, reader = at_visible_stops(model.tokenizer, prompt, sampling, updates, reader)
            samples.append(Sample(sample_id, index, index // n, sampling, updates, watch, reader))
    if server.settings.enable_log_requests:
        lengths = ", ".join(str(len(prompt)) for prompt in prompts)
        _log.info("request %s: %s prompt tokens, %s", public_id, lengths, _numbers(pooling or asked[0][1]))
    chat = model.chats.of(request)
    reasons = new_reader is not None and chat is not None and chat.reasoning_format is not None
    usage = _new_usage(prompts, asked[0][1], reasons)
    role = _role(request.conversation, server.settings.response_role)
    name, now = request.model or model.names[0], int(time.time())
    watches = [each.watch for each in samples]
    record = new_record(public_id, caller.name, name, n, watches, asked[0][1])
    scope = request.cache_salt if adapter is None else f"{request.cache_salt}\0{adapter.version}"
    ended = _at_the_end(server, caller, usage, Ended(record.received, scope, prompts, watches))
    return Generation(
        public_id, caller.name, request.tenant, now, name, role, n, prompts, samples, usage, record,
        server.metrics, server.requests, server.running, ended, _fingerprint(model.info.fingerprint, server),
    )  # fmt: skip


def _fingerprint(own: str, server: ServerState) -> str:
    """Return the model's fingerprint, with the number of times that its weights have been replaced."""
    version = server.engine.weights_version if own else 0
    return f"{own}-{version}" if version else own


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise the engine's refusals in the block as errors for the client."""
    try:
        yield
    except ValueError as error:
        raise invalid(error) from None
    except EngineAsleepError as error:
        raise UnavailableError(str(error)) from None
    except EngineDeadError as error:
        raise UnavailableError(f"the engine is not running: {error}") from None


def _new_usage(prompts: list[list[int]], sampling: SamplingParams, reasons: bool) -> Usage:
    """Return the usage at the start. `reasons`: tokens of reasoning are counted."""
    usage = Usage(sum(map(len, prompts)))
    if reasons:
        usage.reasoning_tokens = 0
    if sampling.prediction is not None:
        usage.predicted_tokens = 0, 0
    return usage


def _role(conversation: Conversation | None, default: str) -> str:
    """Return the role of the generated messages: that of the last message, if the outputs continue it."""
    if conversation is None or conversation.add_generation_prompt:
        return default
    return conversation.messages[-1].role


def _at_the_end(server: ServerState, caller: Caller, usage: Usage, recorded: Ended) -> list[Callable[[], None]]:
    """Return the callbacks for the end of a request. The prompt's tokens count against the rate limit immediately."""
    ended: list[Callable[[], None]] = []
    if server.recorder is not None:
        ended.append(partial(server.recorder.add, recorded))
    if caller.tokens_per_minute is not None:
        server.rate_limits.use_tokens(caller, usage.prompt_tokens)
        ended.append(lambda: server.rate_limits.use_tokens(caller, usage.completion_tokens))
    return ended


def _numbers(params: SamplingParams | PoolingParams) -> str:
    """Format the numeric parameters that differ from the defaults. Logs contain no text and no token ids."""
    given = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    defaults = {field.name: field.default for field in dataclasses.fields(params)}
    shown = [
        f"{name}={value}" for name, value in given.items() if isinstance(value, int | float) and value != defaults[name]
    ]
    return f"{type(params).__name__}({', '.join(shown)})"


def _reader(model: Model, request: GenerationRequest, prompt: Prompt) -> AnswerReader:
    """Return a new parser for one answer to a conversation."""
    chat = prompt.chat
    assert chat is not None  # the prompt was rendered with it
    format = chat.format_for(request)
    callable = [tool for _, tool in request.callable_tools] if format is not None else []
    if chat.writes_harmony:
        return HarmonyReader(
            [tool.name for tool in callable],
            model.tokenizer.token_text,
            continued=prompt.past_reasoning,
            shows_reasoning=request.include_reasoning,
        )
    reasoning = tools = counter = None
    if (marks := chat.reasoning_format) is not None:
        reasoning = ReasoningReader(marks, prompt.in_reasoning)
        counter = TokenCounter(marks.end, model.tokenizer.token_text)
    if format is not None and callable:
        max_calls = None if chat.takes_several_calls(request) else 1
        schemas = {tool.name: tool.parameters for tool in callable}
        tools = ToolReader(format, schemas, max_calls, required=request.tool_mode == "required")
    elif chat.tool_format is not None and chat.tool_format.content:
        tools = ToolReader(chat.tool_format, {}, None)  # removes the mark before the content
    return MarkedReader(reasoning, tools, counter=counter, shows_reasoning=request.include_reasoning)
