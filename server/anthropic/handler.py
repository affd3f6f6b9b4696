"""/v1/messages: a conversation in, blocks out, whole or as Anthropic's events. Knows those shapes; runs no engine."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from engine.output_collector import RequestUpdate
from server.anthropic.protocol import RENAMED, CountTokensRequest, MessagesRequest, parsed_arguments
from server.generation.served_model import Sample, Serving, Usage
from server.http.errors import APIError
from server.http.fields import Ignored
from server.http.sse import event
from server.openai.chat import handler as chats
from server.openai.chat.handler import Chat
from server.parsing.pieces import Block, Blocks, CallArguments, CallStart, Content, Piece, Reasoning

_encode = msgspec.json.encode
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


async def begin(serving: Serving, request: MessagesRequest, ignored: Ignored) -> Chat:
    """Check everything and start the answer."""
    try:
        return await chats.begin(serving, request.as_chat(), ignored, "msg_")
    except APIError as error:
        raise error.renamed(RENAMED) from None


async def count_tokens(serving: Serving, request: CountTokensRequest) -> dict[str, Any]:
    """How many tokens the prompt has."""
    serving.check_model(request.model)
    try:
        prompt = await chats.encode(serving, request.as_chat())
    except APIError as error:
        raise error.renamed(RENAMED) from None
    return {"input_tokens": len(prompt.token_ids)}


def _message(chat: Chat, **members: Any) -> dict[str, Any]:
    message: dict[str, Any] = {
        "id": chat.generation.id,
        "type": "message",
        "role": "assistant",
        "model": chat.generation.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(chat.generation.usage),
    }
    return message | members | chat.ignored.as_dict()


def _usage(usage: Usage) -> dict[str, Any]:
    """Tokens from the cache are not among the input tokens here."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(chat: Chat, sample: Sample, update: RequestUpdate) -> dict[str, Any]:
    sequence = update.stop_reason if isinstance(update.stop_reason, str) else None
    reason = _STOP_REASONS.get(chat.finish_reason(sample, update) or "", "end_turn")
    if sequence is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _block(block: Block, text: str) -> dict[str, Any]:
    if block.kind is Content:
        return {"type": "text", "text": text}
    if block.kind is Reasoning:
        return {"type": "thinking", "thinking": text, "signature": _signature(text) if text else ""}
    arguments = parsed_arguments(text) if text else {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def _signature(thinking: str) -> str:
    """Clients hand it back with the thoughts; here nothing depends on it."""
    return hashlib.sha256(thinking.encode(errors="replace")).hexdigest()


async def answer(chat: Chat) -> bytes:
    """The response's JSON."""
    blocks, stop = Blocks(), {}
    async with aclosing(chat.updates()) as updates:
        async for sample, update, pieces in updates:
            blocks.extend(pieces)
            stop = _stop(chat, sample, update)
    return _encode(_message(chat, content=[_block(block, block.text) for block in blocks.all], **stop))


async def events(chat: Chat) -> AsyncGenerator[bytes, None]:
    """The response's events."""
    blocks, stop = Blocks(), {}
    yield _event("message_start", message=_message(chat))
    async with aclosing(chat.updates()) as updates:
        async for sample, update, pieces in updates:
            if data := b"".join(_piece_events(blocks, piece) for piece in pieces):
                yield data
            stop = _stop(chat, sample, update)
    end = _event("message_delta", delta=stop, usage=_usage(chat.generation.usage))
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


def failure(error: APIError) -> bytes:
    """The event of an error."""
    return event(error.anthropic_body(), b"error")
