"""The paths of /v1/responses. Knows paths and bodies; what is done with them is elsewhere."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response

from server.generation.served_model import Serving
from server.http.fields import Ignored
from server.http.responses import streamed, whole
from server.openai.responses import handler as responses
from server.openai.responses.protocol import ResponsesRequest
from server.openai.responses.store import ResponseStore


def add_routes(app: FastAPI, serving: Serving) -> None:
    settings = serving.settings
    store = ResponseStore(settings.max_stored_responses)

    @app.post("/v1/responses", response_model=None)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        ignored = Ignored(settings.strict).add_fields(body)
        working = await responses.begin(serving, store, body, ignored)
        if body.stream:
            return streamed(settings, responses.events(serving, store, working), ignored, end=b"")
        return await whole(request, responses.answer(serving, store, working), ignored)

    @app.post("/v1/responses/input_tokens")
    async def count_input_tokens(body: ResponsesRequest) -> dict[str, Any]:
        ignored = Ignored(settings.strict).add_fields(body)
        return await responses.count_input_tokens(serving, store, body) | ignored.as_dict()

    @app.get("/v1/responses/{response_id}", response_model=None)
    async def get_response(response_id: str) -> Response:
        return Response(responses.stored(store, response_id).body, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> dict[str, Any]:
        return responses.delete(store, response_id)

    @app.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        return responses.input_items(responses.stored(store, response_id), limit, order, after)
