"""/v1/chat/completions: the answers to a conversation, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from engine import RequestUpdate
from engine.core.batch import TokenLogprobs
from server.apis.openai.chat.protocol import ChatCompletionRequest
from server.apis.openai.errors import DONE, failure
from server.apis.openai.logprobs import logprobs_content, prompt_logprobs
from server.apis.openai.streaming import CompletionStream, head_members
from server.apis.openai.usage import metrics_object, usage_object
from server.generation.generation import TOOL_CALLS, Generation, Sample
from server.generation.model import Model
from server.generation.server_state import ServerState
from server.generation.start import generate
from server.generation.usage import Usage
from server.generation.warnings import Warnings
from server.http.callers import caller_of
from server.http.reading import converted
from server.http.responses import streamed, whole
from server.http.sse import event
from server.parsing.pieces import Block, Blocks, CallArguments, CallStart, Content, Piece, Reasoning

_encode = msgspec.json.encode
_TEXT_BEGIN = b',"choices":[{"index":%d,"delta":{"content":'
_TEXT_END = b'},"logprobs":null,"finish_reason":null}]}\n\n'
_CHOICE = b'%b,"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b'


def add_routes(app: FastAPI, server: ServerState) -> None:
    model = server.model

    @app.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        warnings, asked = await converted(request, body, ChatCompletionRequest.neutral)
        generation = await generate(server, asked, warnings, caller_of(request))
        if body.stream:
            keep_alive = server.settings.sse_keep_alive_interval
            return streamed(
                _events(model, body, generation, warnings), warnings, failure=failure, end=DONE, keep_alive=keep_alive
            )
        return await whole(_answer(model, body, generation, warnings), warnings)


# ---- whole ----


async def _answer(model: Model, body: ChatCompletionRequest, generation: Generation, warnings: Warnings) -> bytes:
    """Return the response's JSON."""
    choices = [_Choice(model, body, generation.role) for _ in generation.samples]
    scores: list[TokenLogprobs] | None = None
    async with aclosing(generation.events()) as events:
        async for sample, update, pieces in events:
            choices[sample.index].add(sample, update, pieces)
            scores = scores or update.prompt_logprobs
    num_chars = None if body.is_scored else generation.usage.total_tokens
    return await model.in_thread(
        _encoded, model, body, generation, warnings, choices, scores, tenant=generation.tenant, num_chars=num_chars
    )


def _encoded(
    model: Model,
    body: ChatCompletionRequest,
    generation: Generation,
    warnings: Warnings,
    choices: list[_Choice],
    scores: list[TokenLogprobs] | None,
) -> bytes:
    """Encode the response. `scores`: log probabilities of the prompt's tokens."""
    prompt = generation.prompts[0]
    answer = {
        **head_members(generation, "chat.completion"),
        "choices": [choice.as_dict(index) for index, choice in enumerate(choices)],
        "usage": usage_object(generation.usage),
        "metrics": metrics_object(generation.timings),
        "prompt_logprobs": prompt_logprobs(model.tokenizer, prompt, scores) if scores is not None else None,
        "prompt_token_ids": prompt if body.return_token_ids else None,
    }
    return _encode(answer)[:-1] + warnings.member + b"}"


class _Choice:
    """Collects one answer of a non-streamed response."""

    def __init__(self, model: Model, body: ChatCompletionRequest, role: str) -> None:
        self._model, self._body, self._role = model, body, role
        self._blocks = Blocks()
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def add(self, sample: Sample, update: RequestUpdate, pieces: list[Piece]) -> None:
        self._blocks.extend(pieces)
        self._token_ids += update.token_ids
        if update.logprobs is not None:
            as_ids = bool(self._body.return_tokens_as_token_ids)
            self._logprobs += logprobs_content(self._model.tokenizer, update.token_ids, update.logprobs, as_ids)
        self._finish_reason, self._stop_reason = sample.finish_reason(update), update.stop_reason

    def as_dict(self, index: int) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": self._message(),
            "logprobs": {"content": self._logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = self._token_ids
        return choice

    def _message(self) -> dict[str, Any]:
        blocks = self._blocks
        message: dict[str, Any] = {"role": self._role, "content": blocks.text(Content), "refusal": None}
        message["reasoning"] = reasoning = blocks.text(Reasoning) or None
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls := blocks.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [_call(call) for call in calls]
        return message


def _call(call: Block) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}


# ---- streamed ----


async def _events(
    model: Model, body: ChatCompletionRequest, generation: Generation, warnings: Warnings
) -> AsyncGenerator[bytes, None]:
    """Yield the response's events. Constant parts are encoded once, because hundreds of streams run at a time."""
    stream = _Stream(model, body, generation, warnings)
    text_begins = stream.text_begins
    async with aclosing(generation.events()) as events:
        async for sample, update, pieces in events:
            if (
                len(pieces) == 1
                and type(pieces[0]) is Content
                and update.finish_reason is None
                and update.logprobs is None
                and (begin := text_begins.get(sample.index)) is not None
            ):  # fast path for most events: the same bytes as from `stream.write`
                yield begin + _encode(pieces[0].text) + _TEXT_END
            elif data := stream.write(sample, update, pieces):
                yield data
    if stream.with_usage:
        yield stream.usage_event()


class _Stream(CompletionStream):
    """Writes the events of a streamed response."""

    def __init__(self, model: Model, body: ChatCompletionRequest, generation: Generation, warnings: Warnings) -> None:
        super().__init__(body, generation, "chat.completion.chunk")
        self._model, self._body, self._warnings = model, body, warnings
        self._only_text = not (self.usage_always or body.return_token_ids)
        self._begun: set[int] = set()
        # By choice index: the start of events that contain only text. Empty if every event contains more.
        self.text_begins: dict[int, bytes] = {}

    def write(self, sample: Sample, update: RequestUpdate, pieces: list[Piece]) -> bytes:
        """Return the events of one update; empty if the update adds nothing."""
        body, index = self._body, sample.index
        data = b"" if index in self._begun else self._begin(index)
        logprobs = b"null"
        if update.logprobs is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            content = logprobs_content(self._model.tokenizer, update.token_ids, update.logprobs, as_ids)
            logprobs = _encode({"content": content, "refusal": None})
        finish_reason, deltas = sample.finish_reason(update), _deltas(pieces)
        if not deltas and (finish_reason is not None or update.logprobs is not None or body.return_token_ids):
            deltas = [b"{}" if finish_reason == TOOL_CALLS else b'{"content":""}']
        for delta in deltas[:-1]:
            data += event(self._chunk(index, delta, logprobs, b"null") + b"}")
            logprobs = b"null"
        if deltas:
            end = b"null"
            if finish_reason is not None:
                end = b'%b,"stop_reason":%b' % (_encode(finish_reason), _encode(update.stop_reason))
            if body.return_token_ids:
                end += b',"token_ids":' + _encode(update.token_ids)
            data += event(self._chunk(index, deltas[-1], logprobs, end) + b"}")
        return data

    def _begin(self, index: int) -> bytes:
        """Return the first event of a choice. The first choice's event also carries the response-wide members."""
        more = b""
        if not self._begun:
            more = self._warnings.member
            if self._body.return_token_ids:
                more += b',"prompt_token_ids":' + _encode(self._generation.prompts[0])
        self._begun.add(index)
        if self._only_text:
            self.text_begins[index] = b"data: " + self.head + _TEXT_BEGIN % index
        first = b'{"role":%b,"content":""}' % _encode(self._generation.role)
        nothing_yet = Usage(self._generation.usage.prompt_tokens)
        return event(
            self._chunk(index, first, b"null", b"null", None if self._begun - {index} else nothing_yet) + more + b"}"
        )

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, end: bytes, usage_so_far: Usage | None = None) -> bytes:
        return _CHOICE % (self.head, index, delta, logprobs, end, self.usage_member(usage_so_far))


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
