"""Turns API requests into engine requests: checks, sampling parameters, prompts and samples."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from functools import partial

from engine.core.engine_request import EngineRequest
from engine.core.params.pooling import UNSAMPLED, PoolingParams
from engine.core.params.sampling import SamplingParams
from engine.errors import EngineDeadError
from engine.processing.output_collector import RequestUpdate, with_samples
from server.generation.beam_search import beam_searches
from server.generation.chat_format import ChatFormat
from server.generation.conversation import Prompt
from server.generation.generation import Generation, Sample, already_running
from server.generation.guided import guided
from server.generation.request import EmbeddingRequest, GenerationRequest, PromptRequest
from server.generation.served_model import ServedModel
from server.generation.usage import Usage
from server.http.callers import Caller
from server.http.errors import APIError, invalid, spelled
from server.http.limits import MAX_ANSWERS
from server.http.warnings import Warnings
from server.observability.recorder import Ended
from server.observability.requests import new_record
from server.parsing.answer import AnswerReader, MarkedReader, TokenCounter
from server.parsing.harmony import EFFORTS, ENDS, HarmonyReader
from server.parsing.reasoning import ReasoningReader
from server.parsing.tools import ToolReader

_log = logging.getLogger(__name__)
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1000  # characters
_BEGUN_AT_ONCE = 8  # samples started before yielding to the event loop: about a millisecond


async def generate(model: ServedModel, request: GenerationRequest, warnings: Warnings, caller: Caller) -> Generation:
    """Check a request and start its answers. Raises `APIError`, which uses the field names of the request's API.

    Status 400: invalid or unsupported; 403: priority not permitted; 404: unknown model; 503: the queue is full or the
    engine is not running.
    """
    with spelled(request.names):
        model.check_name(request.model)
        _check_priority(request, caller)
        request = request.of(caller)
        _check_stop(request)
        sampling = _sampling(model, request)
        _check_num_answers(request, sampling.n)
        with model.queue.entering(request.num_prompts * sampling.n, request.owner):
            return await _generate(model, request, caller, sampling, warnings)


async def _generate(
    model: ServedModel, request: GenerationRequest, caller: Caller, sampling: SamplingParams, warnings: Warnings
) -> Generation:
    if request.conversation is not None:
        request.conversation.check()
    chat = model.chats.of(request)
    _check_tools(model, request, chat, warnings)
    _warn_of_unused_variables(request, chat, warnings)
    prompts = await model.encode(request, is_to_fit=True)
    warn_of_changes(request, prompts[0], warnings)
    sampling = _with_budget(model, request, chat, prompts[0], _with_marks(model, request, chat, sampling), warnings)
    sampling = await _prepared(model, request, sampling)
    sampling = await guided(model, request, chat, prompts[0], sampling, warnings)
    if not model.engine.generates:
        kind, path = ("embeddings", "embeddings") if model.engine.classifier is None else ("classification", "classify")
        reason = f"The model `{model.names[0]}` is published for {kind} and generates no text. Use /v1/{path}."
        raise APIError(400, reason, "model", lead=None)
    token_ids = [model.truncated(prompt, request, sampling.max_tokens or 1) for prompt in prompts]
    _check_prompts(model, token_ids, 1)
    _warn_of_short_answers(model, request, token_ids, warnings)
    asked = [(prompt, each) for prompt in token_ids for each in with_samples(_limited(model, prompt, sampling))]
    begin_one = model.engine.generate
    if request.length_penalty is not None:
        begin_one = (await beam_searches(model, request, sampling, warnings)).generate
    new_reader = partial(_reader, model, request, chat, prompts[0]) if request.conversation is not None else None
    return await _begin(model, request, caller, token_ids, asked, begin_one, new_reader=new_reader)


async def embed(model: ServedModel, request: EmbeddingRequest, caller: Caller) -> Generation:
    """Check a request and start its embeddings. Each prompt has one sample with one update."""
    with spelled(request.names):
        model.check_name(request.model)
        _check_priority(request, caller)
        request = request.of(caller)
        try:
            pooling = PoolingParams(**{"pooling": model.engine.default_pooling, **request.pooling})
        except ValueError as error:
            raise invalid(error) from None
        _check_num_answers(request, 1)
        with model.queue.entering(request.num_prompts, request.owner):
            prompts = await model.encode(request, is_to_fit=True)
            token_ids = [model.truncated(prompt, request, 0) for prompt in prompts]
            _check_prompts(model, token_ids, 0)
            asked = [(prompt, UNSAMPLED) for prompt in token_ids]
            return await _begin(model, request, caller, token_ids, asked, model.engine.generate, pooling=pooling)


# ---- checks ----


def _check_priority(request: PromptRequest, caller: Caller) -> None:
    if request.priority < 0 and not caller.may_prioritise:
        raise APIError(403, "values below 0 require a key with `priority: true` in the key file", "priority")


def _check_tools(model: ServedModel, request: GenerationRequest, chat: ChatFormat | None, warnings: Warnings) -> None:
    choice, names = request.tool_choice, {tool.name for tool in request.tools}
    if not names and (choice.names or choice.mode == "required"):
        raise APIError(400, "requires tools", "tool_choice")
    if unknown := [name for name in choice.names if name not in names]:
        raise APIError(400, f"names the tool {unknown[0]!r}, which is not in tools", "tool_choice")
    if request.tool_mode == "none":
        return
    if request.tool_mode == "auto" and not model.settings.enable_auto_tool_choice:
        raise APIError(400, '"auto" is disabled on this server: use "none", "required" or a function', "tool_choice")
    if chat is not None and chat.tool_format is None:
        is_off = model.settings.tool_call_parser == "none"
        why = "the server parses no tool calls" if is_off else "the chat template has no known tool call format"
        forced = "the answer is a list of JSON objects" if request.tool_mode == "required" else "the answer is text"
        warnings.add(f"{why}, so {forced}: --tool-call-parser NAME sets a format", "tools", names=request.names)


def _check_stop(request: GenerationRequest) -> None:
    stop = request.sampling.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_LENGTH for text in stop):
        reason = f"must be at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters each"
        raise APIError(400, reason, "stop")


def _check_num_answers(request: PromptRequest, n: int) -> None:
    """Bound the number of answers: each is an engine request, and needs preparation first."""
    num_prompts = request.num_prompts
    if num_prompts * n > MAX_ANSWERS:
        each = f" with n={n}" if n > 1 else ""
        raise APIError(400, f"must be at most {MAX_ANSWERS // n} prompts{each}, got {num_prompts}", "prompt", lead=" ")


def warn_of_changes(request: PromptRequest, prompt: Prompt, warnings: Warnings) -> None:
    """Warn of each way in which the prompt differs from the request's conversation."""
    for change in prompt.changes:
        warnings.add(change, "messages", names=request.names)


def _warn_of_unused_variables(request: GenerationRequest, chat: ChatFormat | None, warnings: Warnings) -> None:
    if (conversation := request.conversation) is None:
        return
    source = chat.source if chat is not None else ""
    for name in ("reasoning_effort", "enable_thinking"):
        if getattr(conversation, name) is not None and not any(
            variable in source for variable in conversation.thinking_variables
        ):
            warnings.add("has no effect: the chat template does not use it", name, names=request.names)
    if (
        chat is not None
        and chat.writes_harmony
        and (nearest := EFFORTS.get(conversation.reasoning_effort or "")) is not None
    ):
        warnings.add(
            f"the model supports low, medium and high: treated as {nearest}", "reasoning_effort", names=request.names
        )
    if conversation.verbosity not in (None, "medium") and "verbosity" not in source:
        warnings.add("has no effect: the chat template does not use it", "verbosity", names=request.names)


def _warn_of_short_answers(
    model: ServedModel, request: GenerationRequest, prompts: list[list[int]], warnings: Warnings
) -> None:
    left = model.engine.max_model_len - max(map(len, prompts))
    if (request.sampling.get("max_tokens") or 0) > left:
        warnings.add(f"the context has room for only {left} tokens of the answer", "max_tokens", names=request.names)


def _check_prompts(model: ServedModel, prompts: list[list[int]], num_reserved: int) -> None:
    """Check the prompts' lengths. `num_reserved`: tokens of the context to leave for the answer."""
    most = model.engine.max_model_len
    for prompt in prompts:
        if not prompt:
            raise APIError(400, "is empty: it must have at least one token", "prompt", lead=" ")
        if len(prompt) + num_reserved > most:
            kept = ", at least one of them for the answer" if num_reserved else ""
            reason = (
                f"This model's maximum context length is {most} tokens{kept}. "
                f"However, your prompt has {len(prompt)} tokens. Please shorten it."
            )
            raise APIError(400, reason, "prompt", lead=None)


# ---- sampling ----


def _sampling(model: ServedModel, request: GenerationRequest) -> SamplingParams:
    """Return the request's values; unset ones take the model's defaults, then those of `SamplingParams`."""
    defaults = {"max_tokens": request.default_max_tokens, **model.engine.default_sampling}
    try:
        return SamplingParams(**{**defaults, **request.sampling})
    except ValueError as error:
        raise invalid(error) from None


async def _prepared(model: ServedModel, request: PromptRequest, sampling: SamplingParams) -> SamplingParams:
    """Let the engine check the parameters, once for all answers."""
    try:
        return await model.engine.prepare(sampling, request.owner)
    except ValueError as error:
        raise invalid(error) from None


def _with_marks(
    model: ServedModel, request: GenerationRequest, chat: ChatFormat | None, sampling: SamplingParams
) -> SamplingParams:
    """Keep special tokens in the text if they mark reasoning or tool calls, so that the parsers see them."""
    if request.conversation is None or chat is None:
        return sampling
    marks = [chat.reasoning_format.end] if chat.reasoning_format is not None else []
    if (format := chat.format_for(request)) is not None:
        marks += format.special_marks
    if any(model.tokenizer.token_to_id(mark) in model.tokenizer.special_ids for mark in marks):
        sampling = sampling.clone(skip_special_tokens=False)
    if chat.writes_harmony:
        ends = [i for i in map(model.tokenizer.token_to_id, ENDS) if i is not None]
        sampling = sampling.clone(stop_token_ids=[*(sampling.stop_token_ids or ()), *ends])
    return sampling


def _with_budget(
    model: ServedModel,
    request: GenerationRequest,
    chat: ChatFormat | None,
    prompt: Prompt,
    sampling: SamplingParams,
    warnings: Warnings,
) -> SamplingParams:
    """Add the tokens that delimit the reasoning, for its token budget; without such tokens drop the budget."""
    if sampling.thinking_token_budget is None:
        return sampling
    marks = chat.reasoning_format if chat is not None and request.conversation is not None else None
    if marks is not None:
        begin, end = model.tokenizer.token_to_id(marks.begin), model.tokenizer.token_to_id(marks.end)
        if end is not None and (begin is not None or prompt.in_reasoning):
            return sampling.clone(thinking_marks=(-1 if prompt.in_reasoning or begin is None else begin, end))
    reason = "has no effect here: the reasoning is not delimited by single tokens"
    warnings.add(reason, "thinking_token_budget", names=request.names)
    return sampling.clone(thinking_token_budget=None)


def _limited(model: ServedModel, prompt: list[int], sampling: SamplingParams) -> SamplingParams:
    """Limit `max_tokens` to the remaining context."""
    left = model.engine.max_model_len - len(prompt)
    max_tokens = left if sampling.max_tokens is None else min(left, sampling.max_tokens)
    if max_tokens == sampling.max_tokens:
        return sampling
    try:
        return sampling.clone(max_tokens=max_tokens)
    except ValueError as error:
        raise invalid(error) from None


# ---- to the engine ----


async def _begin(
    model: ServedModel,
    request: PromptRequest,
    caller: Caller,
    prompts: list[list[int]],
    asked: list[tuple[list[int], SamplingParams]],
    begin_one: Callable[[EngineRequest], AsyncGenerator[RequestUpdate, None]],
    *,
    pooling: PoolingParams | None = None,
    new_reader: Callable[[], AnswerReader] | None = None,
) -> Generation:
    """Start the samples with `begin_one`. `asked` has the same number for each prompt; `new_reader` creates a parser.

    Yields to the event loop in between. On an error or cancellation, the samples already started end.
    """
    unique = uuid.uuid4().hex
    public_id = f"{request.id_prefix}{request.request_id or unique}"
    if (caller.name, public_id) in model.running:
        raise already_running(public_id)
    engine_id = f"{public_id}-{unique}" if request.request_id else public_id
    n = len(asked) // len(prompts)
    samples: list[Sample] = []
    try:
        for index, (prompt, sampling) in enumerate(asked):
            if index % _BEGUN_AT_ONCE == _BEGUN_AT_ONCE - 1:
                await asyncio.sleep(0)
            sample_id = f"{engine_id}-{index}" if len(asked) > 1 else engine_id
            watch = model.metrics.watch(len(prompt), sampling)
            one = EngineRequest(
                sample_id, prompt, sampling, pooling,
                request.cache_salt, request.priority, request.owner, request.deadline, request.arrival,
            )  # fmt: skip
            reader = new_reader() if new_reader is not None else None
            updates = begin_one(one)
            samples.append(Sample(sample_id, index, index // n, sampling, updates, watch, reader))
    except ValueError as error:
        raise invalid(error) from None
    except EngineDeadError as error:
        raise APIError(503, f"the engine is not running: {error}") from None
    if model.settings.enable_log_requests:
        lengths = ", ".join(str(len(prompt)) for prompt in prompts)
        _log.info("request %s: %s prompt tokens, %s", public_id, lengths, _numbers(pooling or asked[0][1]))
    usage = Usage(sum(map(len, prompts)))
    chat = model.chats.of(request)
    if new_reader is not None and chat is not None and chat.reasoning_format is not None:
        usage.reasoning_tokens = 0
    role, conversation = model.settings.response_role, request.conversation
    if conversation is not None and not conversation.add_generation_prompt:
        role = conversation.messages[-1].role
    name, now = request.model or model.names[0], int(time.time())
    watches = [each.watch for each in samples]
    record = new_record(public_id, caller.name, name, n, watches, asked[0][1])
    ended = _at_the_end(model, caller, usage, Ended(record.received, request.cache_salt, prompts, watches))
    return Generation(
        public_id, caller.name, now, name, role, n, prompts, samples, usage, record,
        model.metrics, model.requests, model.running, ended,
    )  # fmt: skip


def _at_the_end(model: ServedModel, caller: Caller, usage: Usage, recorded: Ended) -> list[Callable[[], None]]:
    """Return the callbacks for the end of a request. The prompt's tokens count against the rate limit immediately."""
    ended: list[Callable[[], None]] = []
    if model.recorder is not None:
        ended.append(partial(model.recorder.add, recorded))
    if caller.tokens_per_minute is not None:
        model.rate_limits.use_tokens(caller, usage.prompt_tokens)
        ended.append(lambda: model.rate_limits.use_tokens(caller, usage.completion_tokens))
    return ended


def _numbers(params: SamplingParams | PoolingParams) -> str:
    """Format the numeric parameters that differ from the defaults. Logs contain no text and no token ids."""
    given = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    defaults = {field.name: field.default for field in dataclasses.fields(params)}
    shown = [
        f"{name}={value}" for name, value in given.items() if isinstance(value, int | float) and value != defaults[name]
    ]
    return f"{type(params).__name__}({', '.join(shown)})"


def _reader(model: ServedModel, request: GenerationRequest, chat: ChatFormat | None, prompt: Prompt) -> AnswerReader:
    """Return a new parser for one answer to a conversation."""
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
    return MarkedReader(reasoning, tools, counter=counter, shows_reasoning=request.include_reasoning)
