"""/v1/responses: the answer to a conversation of items, whole or streamed, and the responses that are kept."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query, Request, Response
from pydantic import TypeAdapter

from server.generation.generation import Generation
from server.generation.request import GenerationRequest, Message
from server.generation.served_model import ServedModel
from server.generation.start import generate
from server.generation.usage import Usage
from server.http.callers import Caller, caller_of
from server.http.errors import APIError, spelled, unexpected
from server.http.responses import json_response, streamed, whole
from server.http.warnings import MAX_WARNINGS, Warnings
from server.openai.errors import failure
from server.openai.logprobs import logprobs_content
from server.openai.responses.events import ResponseBuilder
from server.openai.responses.protocol import LOGPROBS, Item, ItemReference, ResponsesRequest, messages_of
from server.openai.responses.store import ResponseStore, StoredResponse, Turn

_encode = msgspec.json.encode
_items: TypeAdapter[Any] = TypeAdapter(list[Item])
# The engine's reasons to end: the response's status and, if it is not complete, why.
_ENDS = {"length": ("incomplete", "max_output_tokens"), "abort": ("incomplete", "aborted")}


def add_routes(app: FastAPI, model: ServedModel) -> None:
    settings = model.settings
    store = ResponseStore(settings.max_stored_responses)

    @app.post("/v1/responses", response_model=None)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        warnings, asked = await model.read(request, body, _converter(store, caller_of(request), body))
        working = await _begin(model, body, asked, warnings, caller_of(request))
        if body.stream:
            keep_alive = settings.sse_keep_alive_interval
            events = _events(model, store, working)
            return streamed(events, warnings, failure=failure, end=b"", keep_alive=keep_alive)
        return await whole(_answer(model, store, working), warnings)

    @app.post("/v1/responses/input_tokens", response_model=None)
    async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
        warnings, asked = await model.read(request, body, _converter(store, caller_of(request), body))
        with spelled(asked.request.names):
            model.check_name(body.model)
            [prompt] = await model.encode(asked.request.of(caller_of(request)))
        return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}, warnings)

    @app.get("/v1/responses/{response_id}", response_model=None)
    async def get_response(response_id: str, request: Request) -> Response:
        return Response(_stored(store, caller_of(request), response_id).body, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        caller = caller_of(request)
        _stored(store, caller, response_id)
        store.remove(caller.name, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        return _input_items(_stored(store, caller_of(request), response_id), limit, order, after)


@dataclass(slots=True)
class _Working:
    """A response that is being generated."""

    generation: Generation
    builder: ResponseBuilder
    previous: Turn | None  # what it goes on from
    messages: list[Message]  # what is new in the request, without instructions
    input_items: list[dict[str, Any]]  # the same


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request says, converted."""

    request: GenerationRequest
    previous: Turn | None  # what it goes on from
    messages: list[Message]  # what is new in the request, without instructions
    input_items: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def _converter(store: ResponseStore, caller: Caller, body: ResponsesRequest) -> Callable[[ResponsesRequest], _Asked]:
    """What converts a request in any thread. `APIError` 404 when the response that it goes on from is not there."""
    previous = _previous(store, caller, body.previous_response_id)

    def convert(body: ResponsesRequest) -> _Asked:
        items = [_resolved(store, caller, item, index) for index, item in enumerate(body.items)]
        messages, input_items = messages_of(items), [_input_item(item) for item in items]
        tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
        return _Asked(body.neutral(_all_messages(previous, messages)), previous, messages, input_items, tools)

    return convert


async def _begin(
    model: ServedModel, body: ResponsesRequest, asked: _Asked, warnings: Warnings, caller: Caller
) -> _Working:
    """Check everything and start the answer."""
    for name in (body.include or ())[:MAX_WARNINGS]:
        if name != LOGPROBS:
            warnings.add(f"{name[:100]!r} has no effect here", "include")
    generation = await generate(model, asked.request, warnings, caller)
    builder = ResponseBuilder(_response(body, asked, generation, warnings))
    return _Working(generation, builder, asked.previous, asked.messages, asked.input_items)


def _all_messages(previous: Turn | None, messages: list[Message]) -> list[Message]:
    return messages if previous is None else previous.conversation() + messages


def _previous(store: ResponseStore, caller: Caller, response_id: str | None) -> Turn | None:
    if response_id is None:
        return None
    stored = store.get(caller.name, response_id)
    if stored is None:
        reason = f"there is no response {response_id[:100]!r}: not stored, deleted, or too old"
        raise APIError(404, reason, "previous_response_id")
    return stored.turn


def _resolved(store: ResponseStore, caller: Caller, item: Any, index: int) -> Any:
    if not isinstance(item, ItemReference):
        return item
    found = store.item(caller.name, item.id)
    if found is None:
        raise APIError(404, f"there is no item {item.id[:100]!r}", "input", index, "id")
    return _items.validate_python([found])[0]


def _input_item(item: Any) -> dict[str, Any]:
    """As it is listed later: with an id, its text in a part."""
    given: dict[str, Any] = item.model_dump(exclude_none=True)
    if isinstance(given.get("content"), str):
        given["content"] = [{"type": "input_text", "text": given["content"]}]
    return {"id": f"{given['type'][:3]}_{secrets.token_hex(16)}", **given}


def _response(body: ResponsesRequest, asked: _Asked, generation: Generation, warnings: Warnings) -> dict[str, Any]:
    """The object as it is before there is any output."""
    sampling = generation.samples[0].sampling
    reasoning, text = body.reasoning, body.text
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
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": generation.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": format},
        "tool_choice": body.tool_choice or "auto",
        "tools": asked.tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        **warnings.as_dict(),
    }


async def _events(model: ServedModel, store: ResponseStore, working: _Working) -> AsyncGenerator[bytes, None]:
    """The response's events, the last of which has all of it. An error becomes `response.failed`."""
    builder = working.builder
    yield builder.start()
    try:
        async with aclosing(_fill(model, working)) as filling:
            async for data in filling:
                yield data
    except APIError as error:
        yield builder.fail(error)
    except Exception as error:
        yield builder.fail(unexpected(error))
    _keep(store, working)


async def _answer(model: ServedModel, store: ResponseStore, working: _Working) -> bytes:
    """The response's JSON."""
    async with aclosing(_fill(model, working)) as filling:
        async for _ in filling:
            pass
    _keep(store, working)
    return _encode(working.builder.response)


async def _fill(model: ServedModel, working: _Working) -> AsyncGenerator[bytes, None]:
    builder, generation = working.builder, working.generation
    reason: str | None = None
    async with aclosing(generation.events()) as events:
        async for _, update, pieces in events:
            if update.logprobs is not None:
                builder.hold(logprobs_content(model.tokenizer, update.token_ids, update.logprobs))
            reason = update.finish_reason
            if data := b"".join(map(builder.add, pieces)):
                yield data
    status, why = _ENDS.get(reason or "", ("completed", None))
    yield builder.finish(status, why, _usage(generation.usage))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.total_tokens,
    }


# ---- kept responses ----


def _keep(store: ResponseStore, working: _Working) -> None:
    response = working.builder.response
    if not response["store"] or response["status"] == "failed":
        return
    output = response["output"]
    turn = Turn(working.messages + messages_of(_items.validate_python(output)), working.previous)
    store.put(working.generation.owner, response["id"], StoredResponse.of(response, working.input_items, turn))


def _stored(store: ResponseStore, caller: Caller, response_id: str) -> StoredResponse:
    """404 when the caller has none of this id."""
    found = store.get(caller.name, response_id)
    if found is None:
        reason = f"there is no response {response_id[:100]!r}: not stored, deleted, or too old"
        raise APIError(404, reason, "response_id", lead=None)
    return found


def _input_items(found: StoredResponse, limit: int, order: str, after: str | None) -> dict[str, Any]:
    """A page of the items that the request brought."""
    items = msgspec.json.decode(found.input_items)
    items = items if order == "asc" else items[::-1]
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
