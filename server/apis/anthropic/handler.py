"""/v1/messages: answers to conversations as content blocks, whole or as Anthropic's events."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from engine import RequestUpdate
from server.apis.anthropic.errors import failure
from server.apis.anthropic.protocol import CountTokensRequest, MessagesRequest, parsed_arguments
from server.generation.checks import warn_of_changes
from server.generation.errors import spelled
from server.generation.generation import TOOL_CALLS, Generation, Sample
from server.generation.server_state import ServerState
from server.generation.start import generate
from server.generation.usage import Usage
from server.generation.warnings import Warnings
from server.http.callers import caller_of
from server.http.reading import converted
from server.http.responses import json_response, streamed, whole
from server.http.sse import event
from server.parsing.pieces import Block, Blocks, CallArguments, CallStart, Content, Piece, Reasoning

_encode = msgspec.json.encode
# The API has no reason for an answer that is cut off at a deadline: of its reasons only this one says "incomplete".
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", TOOL_CALLS: "tool_use", "abort": "max_tokens"}


def add_routes(app: FastAPI, server: ServerState) -> None:
    model = server.model
    settings = server.settings

    @app.post("/v1/messages", response_model=None)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        warnings, asked = await converted(request, body, MessagesRequest.neutral)
        generation = await generate(server, asked, warnings, caller_of(request))
        if body.stream:
            keep_alive = settings.sse_keep_alive_interval
            events = _events(generation, warnings)
            return streamed(events, warnings, failure=failure, end=b"", keep_alive=keep_alive)
        return await whole(_answer(generation, warnings), warnings)

    @app.post("/v1/messages/count_tokens", response_model=None)
    async def count_message_tokens(body: CountTokensRequest, request: Request) -> Response:
        warnings, asked = await converted(request, body, CountTokensRequest.neutral)
        with spelled(asked.names):
            model.check_name(asked.model, caller_of(request))
            [prompt] = await model.encode(asked.of(caller_of(request)))
            warn_of_changes(prompt, warnings.named(asked.names))
        return json_response({"input_tokens": len(prompt.token_ids)}, warnings)


def _message(generation: Generation, warnings: Warnings, **members: Any) -> dict[str, Any]:
    message: dict[str, Any] = {
        "id": generation.id,
        "type": "message",
        "role": "assistant",
        "model": generation.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(generation.usage),
    }
    return message | members | warnings.as_dict()


def _usage(usage: Usage) -> dict[str, Any]:
    """Convert token counts. Anthropic's `input_tokens` excludes cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(sample: Sample, update: RequestUpdate) -> dict[str, Any]:
    reason = _STOP_REASONS.get(sample.finish_reason(update) or "", "end_turn")
    if reason == "end_turn" and update.finish_reason == "stop" and isinstance(update.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": update.stop_reason}
    return {"stop_reason": reason, "stop_sequence": None}


def _block(block: Block, text: str) -> dict[str, Any]:
    if block.kind is Content:
        return {"type": "text", "text": text}
    if block.kind is Reasoning:
        return {"type": "thinking", "thinking": text, "signature": _signature(text) if text else ""}
    arguments = parsed_arguments(text) if text else {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def _signature(thinking: str) -> str:
    """Return a signature, which clients send back with the reasoning. Quire ignores it."""
    return hashlib.sha256(thinking.encode(errors="replace")).hexdigest()


async def _answer(generation: Generation, warnings: Warnings) -> bytes:
    """Return the response's JSON."""
    blocks, stop = Blocks(), {}
    async with aclosing(generation.events()) as events:
        async for sample, update, pieces in events:
            blocks.extend(pieces)
            stop = _stop(sample, update)
    content = [_block(block, block.text) for block in blocks.all]
    return _encode(_message(generation, warnings, content=content, **stop))


async def _events(generation: Generation, warnings: Warnings) -> AsyncGenerator[bytes, None]:
    """Yield the response's events."""
    blocks, stop = Blocks(), {}
    yield _event("message_start", message=_message(generation, warnings))
    async with aclosing(generation.events()) as events:
        async for sample, update, pieces in events:
            if data := b"".join(_piece_events(blocks, piece) for piece in pieces):
                yield data
            stop = _stop(sample, update)
    end = _event("message_delta", delta=stop, usage=_usage(generation.usage))
    yield _end_block(blocks, len(blocks.all) - 1) + end + _event("message_stop")


def _piece_events(blocks: Blocks, piece: Piece) -> bytes:
    data = b""
    if blocks.add(piece):
        index = len(blocks.all) - 1
        data = _end_block(blocks, index - 1)
        data += _event("content_block_start", index=index, content_block=_block(blocks.all[index], ""))
    match piece:
        case Content(text):
            delta = {"type": "text_delta", "text": text}
        case Reasoning(text):
            delta = {"type": "thinking_delta", "thinking": text}
        case CallArguments(_, text):
            delta = {"type": "input_json_delta", "partial_json": text}
        case CallStart():
            return data
    return data + _event("content_block_delta", index=len(blocks.all) - 1, delta=delta)


def _end_block(blocks: Blocks, index: int) -> bytes:
    if index < 0:
        return b""
    data, block = b"", blocks.all[index]
    if block.kind is Reasoning:
        delta = {"type": "signature_delta", "signature": _signature(block.text)}
        data = _event("content_block_delta", index=index, delta=delta)
    return data + _event("content_block_stop", index=index)


def _event(name: str, **members: Any) -> bytes:
    return event(_encode({"type": name, **members}), name.encode())
