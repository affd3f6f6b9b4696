"""/v1/models, /tokenize and /detokenize: what is served and how it reads text. Runs no engine."""

from __future__ import annotations

from typing import Any

from server.generation.conversation import encode_messages
from server.generation.served_model import Serving
from server.http.errors import APIError
from server.openai.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest


def cards(serving: Serving) -> list[dict[str, Any]]:
    """One card for each name of the model; `max_model_len` is what clients read."""
    return [
        {
            "id": name,
            "object": "model",
            "created": serving.started,
            "owned_by": "quire",
            "root": serving.names[0],
            "parent": None,
            "max_model_len": serving.engine.max_model_len,
            "permission": [
                {
                    "id": f"modelperm-{number}",
                    "object": "model_permission",
                    "created": serving.started,
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
        for number, name in enumerate(serving.names)
    ]


def card(serving: Serving, name: str) -> dict[str, Any]:
    """404 when there is none of this name."""
    serving.check_model(name)
    return cards(serving)[serving.names.index(name)]


async def tokenize(serving: Serving, request: TokenizeTextRequest | TokenizeChatRequest) -> dict[str, Any]:
    serving.check_model(request.model)
    if isinstance(request, TokenizeChatRequest):
        special = bool(request.add_special_tokens)
        options = request.template_options()
        ids = (await serving.in_thread(encode_messages, serving, request.messages, options, special)).token_ids
    else:
        special = request.add_special_tokens is not False
        ids = await serving.in_thread(serving.tokenizer.encode, request.prompt, special)
    return {
        "count": len(ids),
        "max_model_len": serving.engine.max_model_len,
        "tokens": ids,
        "token_strs": [serving.tokenizer.id_to_token(i) for i in ids] if request.return_token_strs else None,
    }


async def detokenize(serving: Serving, request: DetokenizeRequest) -> dict[str, Any]:
    serving.check_model(request.model)
    size = serving.tokenizer.vocab_size
    if wrong := [i for i in request.tokens if not 0 <= i < size]:
        raise APIError(400, f"tokens: must be from 0 to {size - 1}, got {wrong[0]}", "tokens")
    return {"prompt": await serving.in_thread(serving.tokenizer.decode, request.tokens, False)}
