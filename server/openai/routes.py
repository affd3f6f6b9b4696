"""OpenAI's endpoints: which path leads where. Knows paths and bodies; what is done with them is elsewhere."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from server.generation.served_model import Serving
from server.http.fields import Ignored
from server.http.responses import streamed, whole
from server.openai.chat import handler as chat
from server.openai.completions import handler as completions
from server.openai.embeddings import handler as embeddings
from server.openai.models import handler as models
from server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingBody,
    TokenizeRequest,
)


def add_routes(app: FastAPI, serving: Serving) -> None:
    settings = serving.settings

    @app.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        ignored = Ignored(settings.strict).add_fields(body)
        working = await chat.begin(serving, body, ignored)
        if body.stream:
            return streamed(settings, chat.events(serving, body, working), ignored)
        return await whole(request, chat.answer(serving, body, working), ignored)

    @app.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        ignored = Ignored(settings.strict).add_fields(body)
        generation = await completions.begin(serving, body)
        if body.stream:
            return streamed(settings, completions.events(serving, body, generation, ignored), ignored)
        return await whole(request, completions.answer(serving, body, generation, ignored), ignored)

    @app.post("/v1/embeddings", response_model=None)
    async def create_embeddings(body: EmbeddingBody, request: Request) -> Response:
        ignored = Ignored(settings.strict).add_fields(body)
        generation = await embeddings.begin(serving, body)
        return await whole(request, embeddings.answer(serving, body, generation, ignored), ignored)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": models.cards(serving)}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return models.card(serving, name)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, response: Response) -> dict[str, Any]:
        ignored = Ignored(settings.strict).add_fields(body)
        response.headers.update(ignored.headers)
        return await models.tokenize(serving, body) | ignored.as_dict()

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, response: Response) -> dict[str, Any]:
        ignored = Ignored(settings.strict).add_fields(body)
        response.headers.update(ignored.headers)
        return await models.detokenize(serving, body) | ignored.as_dict()

    @app.post("/v1/requests/{request_id}/abort")
    async def abort_request(request_id: str) -> dict[str, Any]:
        await serving.abort(request_id)
        return {"id": request_id, "aborted": True}
