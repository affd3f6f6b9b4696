"""/v1/chat/completions: a conversation in, an answer out, whole or streamed. Knows the shapes of both; runs no engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.sampling_params import SamplingParams
from engine.output_collector import RequestUpdate
from server.generation.conversation import Prompt, encode_messages, message_text
from server.generation.guided import constrained_chat
from server.generation.served_model import Generation, Sample, Serving
from server.http.errors import APIError
from server.http.fields import Ignored
from server.http.sse import event
from server.openai.logprobs import logprobs_content, prompt_logprobs
from server.openai.protocol import ChatCompletionRequest
from server.parsing.answer import AnswerReader, TokenCounter
from server.parsing.pieces import Block, Blocks, CallArguments, CallStart, Content, Piece, Reasoning
from server.parsing.reasoning import ReasoningReader
from server.parsing.tools import ToolReader

_encode = msgspec.json.encode
_TEXT_BEGIN = b',"choices":[{"index":%d,"delta":{"content":'
_TEXT_END = b'},"logprobs":null,"finish_reason":null}]}\n\n'
_RENAMED = {"logprobs": "top_logprobs", "prompt": "messages", "max_tokens": "max_completion_tokens"}


@dataclass(slots=True)
class Chat:
    """The answers to a conversation, in the making."""

    generation: Generation
    readers: list[AnswerReader]  # one for each sample
    role: str
    ignored: Ignored

    async def updates(self) -> AsyncGenerator[tuple[Sample, RequestUpdate, list[Piece]], None]:
        """`Generation.updates`, read."""
        async with aclosing(self.generation.updates()) as updates:
            async for sample, update in updates:
                yield sample, update, self.read(sample, update)

    def read(self, sample: Sample, update: RequestUpdate) -> list[Piece]:
        """What an update, which must be the next one, says; the usage tells of the reasoning from now on."""
        pieces = self.readers[sample.index].push(update.text, update.token_ids, update.finish_reason is not None)
        if self.generation.usage.reasoning_tokens is not None:
            self.generation.usage.reasoning_tokens = sum(reader.num_reasoning_tokens for reader in self.readers)
        return pieces

    def finish_reason(self, sample: Sample, update: RequestUpdate) -> str | None:
        """The engine's; an answer that ends with calls has a reason of its own."""
        calls = update.finish_reason == "stop" and self.readers[sample.index].has_calls
        return "tool_calls" if calls else update.finish_reason


async def begin(serving: Serving, request: ChatCompletionRequest, ignored: Ignored, kind: str = "chatcmpl-") -> Chat:
    """Check everything and start the answers. `kind`: how their id begins."""
    serving.check_model(request.model)
    _check_tools(serving, request)
    _check_template_variables(serving, request, ignored)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    renamed = _RENAMED if request.max_completion_tokens is not None else {**_RENAMED, "max_tokens": "max_tokens"}
    sampling = serving.sampling(
        request,
        max_tokens=max_tokens,
        default_max_tokens=None,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        renamed=renamed,
    )
    prompt = await encode(serving, request)
    sampling = _show_marks(serving, request, sampling)
    sampling = await constrained_chat(serving, request, prompt, sampling, ignored)
    token_ids = serving.truncated(prompt.token_ids, request.truncate_prompt_tokens, sampling.max_tokens or 1)
    generation = serving.generate(kind, request, [token_ids], sampling, renamed)
    if serving.reasoning_format is not None:
        generation.usage.reasoning_tokens = 0
    readers = [_reader(serving, request, prompt) for _ in generation.samples]
    role = serving.settings.response_role if request.adds_generation_prompt else request.messages[-1].role
    return Chat(generation, readers, role, ignored)


async def encode(serving: Serving, request: ChatCompletionRequest) -> Prompt:
    """The prompt alone."""
    options, special = request.template_options(), bool(request.add_special_tokens)
    num_chars = None if request.tools else sum(len(message_text(message)) for message in request.messages)
    return await serving.in_thread(encode_messages, serving, request.messages, options, special, num_chars=num_chars)


def _check_tools(serving: Serving, request: ChatCompletionRequest) -> None:
    if request.call_mode == "none":
        return
    if request.call_mode == "auto" and not serving.settings.enable_auto_tool_choice:
        raise APIError(400, 'tool_choice: "auto" is turned off here (--no-enable-auto-tool-choice)', "tool_choice")
    if serving.tool_format is None and serving.template is not None:
        message = "the model's chat template has no form of tool calls that is known; --tool-call-parser of the server names one"
        raise APIError(400, f"tools: {message}", "tools")


def _check_template_variables(serving: Serving, request: ChatCompletionRequest, ignored: Ignored) -> None:
    source = serving.template.source if serving.template is not None else ""
    for field in ("reasoning_effort", "enable_thinking"):
        if getattr(request, field) is not None and not any(name in source for name in request.thinking_options):
            ignored.add(field, "the chat template does not ask for it")


def _show_marks(serving: Serving, request: ChatCompletionRequest, sampling: SamplingParams) -> SamplingParams:
    """Marks that are special tokens must be in the text to be read."""
    reasoning, tools = serving.reasoning_format, serving.tool_format
    marks = [reasoning.end] if reasoning is not None else []
    if tools is not None and request.call_mode != "none":
        marks.append(tools.begin)
    special = {serving.tokenizer.id_to_token(i) for i in serving.tokenizer.special_ids}
    return sampling.clone(skip_special_tokens=False) if special.intersection(marks) else sampling


def _reader(serving: Serving, request: ChatCompletionRequest, prompt: Prompt) -> AnswerReader:
    reasoning = tools = counter = None
    if (marks := serving.reasoning_format) is not None:
        reasoning = ReasoningReader(marks, prompt.in_reasoning)
        counter = TokenCounter(marks.end, serving.tokenizer.token_text)
    if serving.tool_format is not None and request.call_mode != "none":
        names = request.chosen_tools or [tool.function.name for tool in request.tools or ()]
        tools = ToolReader(serving.tool_format, names, None if serving.takes_several_calls(request) else 1)
    return AnswerReader(reasoning, tools, counter=counter, shows_reasoning=request.include_reasoning is not False)


# ---- whole ----


async def answer(serving: Serving, request: ChatCompletionRequest, chat: Chat) -> bytes:
    """The response's JSON."""
    generation = chat.generation
    blocks = [Blocks() for _ in generation.samples]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in generation.samples]
    token_ids: list[list[int]] = [[] for _ in generation.samples]
    ends: dict[int, tuple[str | None, int | str | None]] = {}
    scores: dict[str, Any] = {}
    as_ids = bool(request.return_tokens_as_token_ids)
    async for sample, update, pieces in chat.updates():
        blocks[sample.index].extend(pieces)
        token_ids[sample.index] += update.token_ids
        if update.logprobs is not None:
            logprobs[sample.index] += logprobs_content(serving.tokenizer, update.token_ids, update.logprobs, as_ids)
        if update.prompt_logprobs is not None:
            prompt = generation.prompts[0]
            scores = {"prompt_logprobs": prompt_logprobs(serving.tokenizer, prompt, update.prompt_logprobs)}
        ends[sample.index] = (chat.finish_reason(sample, update), update.stop_reason)
    choices = [
        {
            "index": index,
            "message": _message(chat.role, blocks[index]),
            "logprobs": {"content": logprobs[index]} if request.logprobs else None,
            "finish_reason": ends[index][0],
            "stop_reason": ends[index][1],
        }
        | ({"token_ids": token_ids[index]} if request.return_token_ids else {})
        for index in range(len(generation.samples))
    ]
    if request.return_token_ids:
        scores["prompt_token_ids"] = generation.prompts[0]
    body = _encode(
        {
            "id": generation.id,
            "object": "chat.completion",
            "created": generation.created,
            "model": generation.model,
            "choices": choices,
            "usage": generation.usage.as_dict(),
            "metrics": generation.timings_as_dict(),
            **scores,
        }
    )
    return body[:-1] + chat.ignored.member + b"}"


def _message(role: str, blocks: Blocks) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": blocks.text(Content), "refusal": None}
    if reasoning := blocks.text(Reasoning):
        message["reasoning"] = message["reasoning_content"] = reasoning
    if calls := blocks.calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: Block) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}


# ---- streamed ----


async def events(serving: Serving, request: ChatCompletionRequest, chat: Chat) -> AsyncGenerator[bytes, None]:
    """The response's events. Only what changes is encoded for each: a server streams to hundreds of clients at once."""
    generation, options = chat.generation, request.stream_options
    with_usage = options is not None and bool(options.include_usage)
    usage_always = with_usage and options is not None and bool(options.continuous_usage_stats)
    head = _encode(
        {
            "id": generation.id,
            "object": "chat.completion.chunk",
            "created": generation.created,
            "model": generation.model,
        }
    )[:-1]

    def chunk(index: int, delta: bytes, logprobs: bytes, end: bytes) -> bytes:
        choice = b',"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]' % (
            index,
            delta,
            logprobs,
            end,
        )
        usage = b',"usage":' + _encode(generation.usage.as_dict()) if usage_always else b""
        return head + choice + usage

    first = b'{"role":%b,"content":""}' % _encode(chat.role)
    as_ids = bool(request.return_tokens_as_token_ids)
    only_text = not (usage_always or request.return_token_ids)
    begun: dict[int, bytes] = {}  # index → how its events begin that hold nothing but text
    async for sample, update in generation.updates():
        index, data, pieces = sample.index, b"", chat.read(sample, update)
        usual = only_text and index in begun and update.finish_reason is None and update.logprobs is None
        if usual and len(pieces) == 1 and type(pieces[0]) is Content:  # nearly all are such: the same bytes as below
            yield begun[index] + _encode(pieces[0].text) + _TEXT_END
            continue
        if index not in begun:
            more = b"" if begun else chat.ignored.member
            if request.return_token_ids and not begun:
                more += b',"prompt_token_ids":' + _encode(generation.prompts[0])
            data = event(chunk(index, first, b"null", b"null") + more + b"}")
            begun[index] = b"data: " + head + _TEXT_BEGIN % index
        deltas = _deltas(pieces)
        logprobs = b"null"
        if update.logprobs is not None:
            content = logprobs_content(serving.tokenizer, update.token_ids, update.logprobs, as_ids)
            logprobs = _encode({"content": content})
        finish_reason = chat.finish_reason(sample, update)
        if not deltas and (finish_reason is not None or update.logprobs is not None or request.return_token_ids):
            deltas = [b"{}" if finish_reason == "tool_calls" else b'{"content":""}']
        for delta in deltas[:-1]:
            data += event(chunk(index, delta, logprobs, b"null") + b"}")
            logprobs = b"null"
        if deltas:
            end = b"null"
            if finish_reason is not None:
                end = b'%b,"stop_reason":%b' % (_encode(finish_reason), _encode(update.stop_reason))
            if request.return_token_ids:
                end += b',"token_ids":' + _encode(update.token_ids)
            data += event(chunk(index, deltas[-1], logprobs, end) + b"}")
        if data:
            yield data
    if with_usage:
        usage, metrics = _encode(generation.usage.as_dict()), _encode(generation.timings_as_dict())
        yield event(b'%b,"choices":[],"usage":%b,"metrics":%b}' % (head, usage, metrics))


def _deltas(pieces: list[Piece]) -> list[bytes]:
    deltas = []
    for piece in pieces:
        match piece:
            case Content(text):
                delta = b'{"content":%b}' % _encode(text)
            case Reasoning(text):
                delta = b'{"reasoning":%b,"reasoning_content":%b}' % ((encoded := _encode(text)), encoded)
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                delta = _encode({"tool_calls": [call]})
            case CallArguments(index, text):
                delta = _encode({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        deltas.append(delta)
    return deltas
