"""/v1/models, /tokenize and /detokenize: what is served, and how it reads text."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response

from server.generation.served_model import ServedModel
from server.http.errors import APIError, spelled
from server.http.warnings import Warnings
from server.openai.models.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, TokenizeTextRequest


def add_routes(app: FastAPI, model: ServedModel) -> None:
    strict = model.settings.strict

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": _cards(model)}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return _card(model, name)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, response: Response) -> dict[str, Any]:
        warnings = Warnings(strict).add_fields(body)
        response.headers.update(warnings.headers)
        return await _tokenize(model, body) | warnings.as_dict()

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, response: Response) -> dict[str, Any]:
        warnings = Warnings(strict).add_fields(body)
        response.headers.update(warnings.headers)
        return await _detokenize(model, body) | warnings.as_dict()


def _cards(model: ServedModel) -> list[dict[str, Any]]:
    """One card for each name of the model; `max_model_len` is what clients read."""
    return [
        {
            "id": name,
            "object": "model",
            "created": model.started,
            "owned_by": "quire",
            "root": model.names[0],
            "parent": None,
            "max_model_len": model.engine.max_model_len,
            "permission": [
                {
                    "id": f"modelperm-{number}",
                    "object": "model_permission",
                    "created": model.started,
                    "allow_create_engine": False,
                    "allow_sampling": True,
                    "allow_logprobs": True,
                    "allow_search_indices": False,
                    "allow_view": True,
                    "allow_fine_tuning": False,
                    "organization": "*",
                    "group": None,
                    "is_blocking": False,
                }
            ],
        }
        for number, name in enumerate(model.names)
    ]


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    """404 when there is none of this name."""
    model.check_name(name)
    return _cards(model)[model.names.index(name)]


async def _tokenize(model: ServedModel, body: TokenizeTextRequest | TokenizeChatRequest) -> dict[str, Any]:
    request = body.neutral()
    with spelled(request.names):
        model.check_name(request.model)
        ids = (await model.encode(request))[0].token_ids
    return {
        "count": len(ids),
        "max_model_len": model.engine.max_model_len,
        "tokens": ids,
        "token_strs": [model.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None,
    }


async def _detokenize(model: ServedModel, body: DetokenizeRequest) -> dict[str, Any]:
    model.check_name(body.model)
    size = model.tokenizer.vocab_size
    if wrong := [i for i in body.tokens if not 0 <= i < size]:
        raise APIError(400, f"must be from 0 to {size - 1}, got {wrong[0]}", "tokens")
    return {"prompt": await model.in_thread(model.tokenizer.decode, body.tokens, False)}
