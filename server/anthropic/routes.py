"""Anthropic's endpoints: which path leads where. Knows paths and bodies; what is done with them is elsewhere."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from server.anthropic import handler as messages
from server.anthropic.protocol import CountTokensRequest, MessagesRequest
from server.generation.served_model import Serving
from server.http.fields import Ignored
from server.http.responses import streamed, whole


def add_routes(app: FastAPI, serving: Serving) -> None:
    settings = serving.settings

    @app.post("/v1/messages", response_model=None)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        ignored = Ignored(settings.strict).add_fields(body)
        chat = await messages.begin(serving, body, ignored)
        if body.stream:
            return streamed(settings, messages.events(chat), ignored, failure=messages.failure, end=b"")
        return await whole(request, messages.answer(chat), ignored)

    @app.post("/v1/messages/count_tokens")
    async def count_message_tokens(body: CountTokensRequest, response: Response) -> dict[str, Any]:
        ignored = Ignored(settings.strict).add_fields(body)
        response.headers.update(ignored.headers)
        return await messages.count_tokens(serving, body) | ignored.as_dict()
