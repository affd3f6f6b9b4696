"""/v1/embeddings: embeddings of texts, token ids or a conversation."""

from __future__ import annotations

import base64

import msgspec
from fastapi import FastAPI, Request, Response

from engine import EmbeddingOutput
from server.apis.openai.embeddings.protocol import EmbeddingBody
from server.apis.openai.usage import usage_object
from server.generation.generation import Generation
from server.generation.model import Model
from server.generation.server_state import ServerState
from server.generation.start import embed
from server.generation.warnings import Warnings
from server.http.callers import caller_of
from server.http.reading import converted
from server.http.responses import whole

_encode = msgspec.json.encode


def add_routes(app: FastAPI, server: ServerState) -> None:
    model = server.model

    @app.post("/v1/embeddings", response_model=None)
    async def create_embeddings(body: EmbeddingBody, request: Request) -> Response:
        warnings, asked = await converted(request, body, lambda body: body.neutral())
        generation = await embed(server, asked, caller_of(request))
        as_base64 = body.encoding_format == "base64"
        return await whole(_answer(model, generation, warnings, as_base64), warnings)


async def _answer(model: Model, generation: Generation, warnings: Warnings, as_base64: bool) -> bytes:
    """Return the response's JSON."""
    found = await generation.embeddings()
    end = _encode({"model": generation.model, "usage": usage_object(generation.usage)})[1:-1]
    data = await model.in_thread(_data, found, as_base64, tenant=generation.tenant)
    return b'{"id":%b,"object":"list","created":%d,"data":[%b],%b%b}' % (
        _encode(generation.id), generation.created, data, end, warnings.member,
    )  # fmt: skip


def _data(embeddings: list[bytes], as_base64: bool) -> bytes:
    """Encode the embeddings one at a time, so that a long list does not delay other requests."""
    return b",".join(
        _encode(
            {
                "index": index,
                "object": "embedding",
                "embedding": base64.b64encode(each).decode() if as_base64 else EmbeddingOutput.read(each).embedding,
            }
        )
        for index, each in enumerate(embeddings)
    )
