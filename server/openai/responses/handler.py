"""/v1/responses: items in, output items out, whole or as events; responses that are kept. Runs no engine."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter

from server.generation.served_model import Serving, Usage
from server.http.errors import APIError, unexpected
from server.http.fields import Ignored
from server.openai.chat import handler as chats
from server.openai.logprobs import logprobs_content
from server.openai.responses.events import ResponseBuilder
from server.openai.responses.protocol import LOGPROBS, RENAMED, Item, ItemReference, ResponsesRequest, chat_messages
from server.openai.responses.store import ResponseStore, StoredResponse

_encode = msgspec.json.encode
_items: TypeAdapter[Any] = TypeAdapter(list[Item])
# The engine's reasons to end: the response's status and, if it is not complete, why.
_ENDS = {"length": ("incomplete", "max_output_tokens"), "abort": ("incomplete", "aborted")}


@dataclass(slots=True)
class Working:
    """A response in the making."""

    chat: chats.Chat
    builder: ResponseBuilder
    messages: list[dict[str, Any]]  # the conversation so far, without instructions
    input_items: list[dict[str, Any]]


async def begin(serving: Serving, store: ResponseStore, request: ResponsesRequest, ignored: Ignored) -> Working:
    """Check everything and start the answer."""
    for name in request.include or ():
        if name != LOGPROBS:
            ignored.add("include", f"{name[:100]!r} has no effect here")
    items, messages = _conversation(store, request)
    as_chat = request.as_chat(messages)
    try:
        chat = await chats.begin(serving, as_chat, ignored, "resp_")
    except APIError as error:
        raise error.renamed(RENAMED) from None
    return Working(chat, ResponseBuilder(_response(request, chat)), messages, [_input_item(item) for item in items])


async def count_input_tokens(serving: Serving, store: ResponseStore, request: ResponsesRequest) -> dict[str, Any]:
    """How many tokens the prompt has."""
    serving.check_model(request.model)
    _, messages = _conversation(store, request)
    try:
        prompt = await chats.encode(serving, request.as_chat(messages))
    except APIError as error:
        raise error.renamed(RENAMED) from None
    return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}


def _conversation(store: ResponseStore, request: ResponsesRequest) -> tuple[list[Any], list[dict[str, Any]]]:
    """The request's items, and all messages so far."""
    items = [_resolved(store, item, index) for index, item in enumerate(request.items)]
    return items, _previous(store, request.previous_response_id) + chat_messages(items)


def _previous(store: ResponseStore, response_id: str | None) -> list[dict[str, Any]]:
    if response_id is None:
        return []
    stored = store.get(response_id)
    if stored is None:
        message = f"previous_response_id: there is no response {response_id[:100]!r}: not stored, deleted, or too old"
        raise APIError(404, message, "previous_response_id")
    return stored.messages


def _resolved(store: ResponseStore, item: Any, index: int) -> Any:
    if not isinstance(item, ItemReference):
        return item
    found = store.item(item.id)
    if found is None:
        raise APIError(404, f"input[{index}].id: there is no item {item.id[:100]!r}", f"input[{index}].id")
    return _items.validate_python([found])[0]


def _input_item(item: Any) -> dict[str, Any]:
    """As it is listed later: with an id, its text in a part."""
    given: dict[str, Any] = item.model_dump(exclude_none=True)
    if isinstance(given.get("content"), str):
        given["content"] = [{"type": "input_text", "text": given["content"]}]
    return {"id": f"{given['type'][:3]}_{secrets.token_hex(16)}", **given}


def _response(request: ResponsesRequest, chat: chats.Chat) -> dict[str, Any]:
    """The object as it is before there is any output."""
    generation, sampling = chat.generation, chat.generation.samples[0].watch.sampling
    reasoning, text = request.reasoning, request.text
    format = text.format.model_dump(by_alias=True, exclude_none=True) if text and text.format else {"type": "text"}
    return {
        "id": generation.id,
        "object": "response",
        "created_at": generation.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": generation.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": format},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
        **chat.ignored.as_dict(),
    }


async def events(serving: Serving, store: ResponseStore, working: Working) -> AsyncGenerator[bytes, None]:
    """The response's events, the last of which has all of it. An error becomes `response.failed`."""
    builder = working.builder
    yield builder.start()
    try:
        async with aclosing(_fill(serving, working)) as filling:
            async for data in filling:
                yield data
    except APIError as error:
        yield builder.fail(error)
    except Exception as error:
        yield builder.fail(unexpected(error))
    _keep(store, working)


async def answer(serving: Serving, store: ResponseStore, working: Working) -> bytes:
    """The response's JSON."""
    async with aclosing(_fill(serving, working)) as filling:
        async for _ in filling:
            pass
    _keep(store, working)
    return _encode(working.builder.response)


async def _fill(serving: Serving, working: Working) -> AsyncGenerator[bytes, None]:
    builder, chat = working.builder, working.chat
    reason: str | None = None
    async with aclosing(chat.updates()) as updates:
        async for _, update, pieces in updates:
            if update.logprobs is not None:
                builder.hold(logprobs_content(serving.tokenizer, update.token_ids, update.logprobs))
            reason = update.finish_reason
            if data := b"".join(map(builder.add, pieces)):
                yield data
    status, why = _ENDS.get(reason or "", ("completed", None))
    yield builder.finish(status, why, _usage(chat.generation.usage))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


# ---- kept responses ----


def _keep(store: ResponseStore, working: Working) -> None:
    response = working.builder.response
    if not response["store"] or response["status"] == "failed":
        return
    output = response["output"]
    messages = working.messages + chat_messages(_items.validate_python(output))
    body, items = _encode(response), working.input_items
    store.put(response["id"], StoredResponse(body, messages, items, output, len(body) * 2 + len(_encode(items)) * 2))


def stored(store: ResponseStore, response_id: str) -> StoredResponse:
    """404 when there is none of this id."""
    found = store.get(response_id)
    if found is None:
        raise APIError(
            404, f"there is no response {response_id[:100]!r}: not stored, deleted, or too old", "response_id"
        )
    return found


def delete(store: ResponseStore, response_id: str) -> dict[str, Any]:
    stored(store, response_id)
    store.remove(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def input_items(found: StoredResponse, limit: int, order: str, after: str | None) -> dict[str, Any]:
    """A page of the items that the request brought."""
    items = found.input_items if order == "asc" else found.input_items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        items = items[ids.index(after) + 1 :] if after in ids else []
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
