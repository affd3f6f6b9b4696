"""/v1/responses: answers to conversations of items, whole, streamed or in the background; stored responses."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request, Response

from server.apis.openai.errors import failure
from server.apis.openai.responses.answering import begin
from server.apis.openai.responses.asked import Asked, Converter, Kept
from server.apis.openai.responses.background import Background, BackgroundResponse, events_not_kept, replayed
from server.apis.openai.responses.compaction import compacted
from server.apis.openai.responses.conversations import ConversationStore, add_conversation_routes
from server.apis.openai.responses.pages import After, Limit, Order, page
from server.apis.openai.responses.protocol import CompactRequest, ResponsesRequest
from server.apis.openai.responses.store import ResponseStore, StoredResponse
from server.generation.caller import Caller
from server.generation.checks import warn_of_changes
from server.generation.errors import spelled
from server.generation.server_state import ServerState
from server.generation.warnings import Warnings
from server.http.callers import caller_of
from server.http.errors import APIError
from server.http.reading import converted
from server.http.responses import json_response, streamed, whole

_LONG_BYTES = 16 << 10  # larger stored conversations are read in a thread
_PATH = "/v1/responses/{response_id}"


def add_routes(app: FastAPI, server: ServerState) -> None:
    most = server.settings.max_stored_responses
    kept = Kept(ResponseStore(most), ConversationStore(most), Background())
    _add_create_routes(app, server, kept)
    _add_kept_routes(app, server, kept)
    add_conversation_routes(app, server, kept.conversations)


def _add_create_routes(app: FastAPI, server: ServerState, kept: Kept) -> None:
    model = server.model
    keep_alive = server.settings.sse_keep_alive_interval

    async def read(body: ResponsesRequest, request: Request) -> tuple[Warnings, Asked]:
        converter = Converter(kept, caller_of(request), body)
        return await converted(request, body, converter, is_long=converter.num_bytes > _LONG_BYTES)

    @app.post("/v1/responses", response_model=None)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        warnings, asked = await read(body, request)
        working = await begin(server, kept, body, asked, warnings, request)
        if (background := working.background) is not None:
            if not body.stream:
                return json_response(background.response, warnings)
            events = background.follow(-1)
        elif body.stream:
            events = working.events()
        else:
            return await whole(working.answer(), warnings)
        return streamed(events, warnings, failure=failure, end=b"", keep_alive=keep_alive)

    @app.post("/v1/responses/input_tokens", response_model=None)
    async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
        warnings, asked = await read(body, request)
        with spelled(asked.request.names):
            model.check_name(body.model, caller_of(request))
            [prompt] = await model.encode(asked.request.of(caller_of(request)))
            warn_of_changes(prompt, warnings.named(asked.request.names))
        return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}, warnings)

    @app.post("/v1/responses/compact", response_model=None)
    async def compact_response(body: CompactRequest, request: Request) -> Response:
        warnings, asked = await read(body, request)
        return json_response(await compacted(server, asked, warnings, caller_of(request)), warnings)


def _add_kept_routes(app: FastAPI, server: ServerState, kept: Kept) -> None:
    store, background = kept.responses, kept.background

    @app.get(_PATH, response_model=None)
    async def get_response(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> Response:
        caller = caller_of(request)
        running = background.get(caller.name, response_id)
        if running is None:
            found = _stored(store, caller, response_id)
            if not stream:
                return Response(found.body, media_type="application/json")
            if not found.events:
                raise events_not_kept()
            events = replayed(found.events, starting_after)
        elif stream:
            events = running.follow(starting_after)
        else:
            return Response(msgspec.json.encode(running.response), media_type="application/json")
        keep_alive = server.settings.sse_keep_alive_interval
        return streamed(events, Warnings(False), failure=failure, end=b"", keep_alive=keep_alive)

    @app.post(_PATH + "/cancel", response_model=None)
    async def cancel_response(response_id: str, request: Request) -> Response:
        caller = caller_of(request)
        if (running := background.get(caller.name, response_id)) is not None:
            await _cancel(server, caller, running)
            return Response(msgspec.json.encode(running.response), media_type="application/json")
        found = _stored(store, caller, response_id)
        if not found.is_background:
            raise APIError(400, "only a response with background=true can be cancelled", "response_id", lead=None)
        return Response(found.body, media_type="application/json")

    @app.delete(_PATH)
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        caller = caller_of(request)
        if (running := background.get(caller.name, response_id)) is not None:
            await _cancel(server, caller, running)
        _stored(store, caller, response_id)
        store.remove(caller.name, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get(_PATH + "/input_items", response_model=None)
    async def list_input_items(
        response_id: str, request: Request, limit: Limit = 20, order: Order = "desc", after: After = None
    ) -> Response:
        found = _stored(store, caller_of(request), response_id)
        return json_response(page(found.input_items, limit, order, after), Warnings(False))


async def _cancel(server: ServerState, caller: Caller, running: BackgroundResponse) -> None:
    running.is_cancelled = True
    await server.abort(running.response["id"], caller)
    await running.over()


def _stored(store: ResponseStore, caller: Caller, response_id: str) -> StoredResponse:
    """Return a stored response. Raises `APIError` 404 for an unknown id."""
    found = store.get(caller.name, response_id)
    if found is None:
        reason = f"no stored response has the id {response_id[:100]!r}: never stored, deleted or evicted"
        raise APIError(404, reason, "response_id", lead=None)
    return found
