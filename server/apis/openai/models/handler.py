"""/v1/models, /tokenize and /detokenize: the served model and its tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from server.apis.openai.models.protocol import DetokenizeRequest, TokenizeRequest
from server.generation.caller import Caller
from server.generation.checks import warn_of_changes
from server.generation.errors import spelled
from server.generation.model import Model
from server.generation.server_state import ServerState
from server.generation.siblings import ListedModel
from server.generation.warnings import Warnings
from server.http.bodies import warnings_about
from server.http.callers import caller_of
from server.http.errors import APIError
from server.http.reading import converted
from server.http.responses import json_response


def add_routes(app: FastAPI, server: ServerState) -> None:
    model = server.model

    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": _all_cards(server, caller_of(request))}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str, request: Request) -> dict[str, Any]:
        return _card(server, name, caller_of(request))

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        tokenizer = model.tokenizer
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokenizer.special_tokens_map,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": model.info.max_model_len,
            "chat_template": model.chats.default.source if model.chats.default is not None else None,
        }

    @app.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        warnings, asked = await converted(request, body, lambda body: body.neutral())
        with spelled(asked.names):
            model.check_name(asked.model, caller_of(request))
            [prompt] = await model.encode(asked.of(caller_of(request)))
            warn_of_changes(prompt, warnings.named(asked.names))
        num_tokens = len(prompt.token_ids)
        return await model.in_thread(
            _tokens,
            model,
            prompt.token_ids,
            bool(body.return_token_strs),
            warnings,
            tenant=caller_of(request).tenant(""),
            num_chars=num_tokens,
        )

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        warnings = warnings_about(body, server.settings.strict)
        model.check_name(body.model, caller_of(request))
        return await model.in_thread(
            _text, model, body.tokens, warnings, tenant=caller_of(request).tenant(""), num_chars=len(body.tokens)
        )


def _all_cards(server: ServerState, caller: Caller) -> list[dict[str, Any]]:
    return [card for listed in server.listed() for card in _cards(listed, caller)]


def _modalities(model: Model | None) -> list[str] | None:
    if model is None:
        return None
    return ["text", "image"] if model.info.images is not None else ["text"]


def _cards(listed: ListedModel, caller: Caller) -> list[dict[str, Any]]:
    """Return one card for each served name, also those of adapters. Clients read `max_model_len`; null: the model has
    not been loaded so far.
    """
    model = listed.model
    names: list[tuple[str, str | None]] = [(name, None) for name in listed.names]
    if model is not None:
        names += [(each.name, each.parent) for each in model.adapters.all if caller.may_use(each.name)]
    return [
        {
            "id": name,
            "object": "model",
            "created": listed.created,
            "owned_by": "quire",
            "root": listed.names[0],
            "parent": parent,
            "max_model_len": None if model is None else model.info.max_model_len,
            "input_modalities": _modalities(model),
            "output_modalities": None if model is None else ["text"] if model.info.generates else ["embeddings"],
            "permission": [
                {
                    "id": f"modelperm-{number}",
                    "object": "model_permission",
                    "created": listed.created,
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
        for number, (name, parent) in enumerate(names)
    ]


def _card(server: ServerState, name: str, caller: Caller) -> dict[str, Any]:
    """Return the card of a served name. Raises `APIError` 404 for other names."""
    found = next((card for card in _all_cards(server, caller) if card["id"] == name), None)
    if found is None:
        server.model.check_name(name or "\0", caller)
    assert found is not None
    return found


def _tokens(model: Model, ids: list[int], with_strs: bool, warnings: Warnings) -> Response:
    members = {
        "count": len(ids),
        "max_model_len": model.info.max_model_len,
        "tokens": ids,
        "token_strs": [model.tokenizer.id_to_token(i) for i in ids] if with_strs else None,
    }
    return json_response(members, warnings)


def _text(model: Model, ids: list[int], warnings: Warnings) -> Response:
    size = model.tokenizer.vocab_size
    if wrong := next((i for i in ids if not 0 <= i < size), None):
        raise APIError(400, f"must be from 0 to {size - 1}, got {wrong}", "tokens")
    return json_response({"prompt": model.tokenizer.decode(ids, False)}, warnings)
