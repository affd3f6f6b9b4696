"""The API reference of /v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from server.apis.endpoint import CREATED, HELLO, MODEL, Endpoint

TAG = "Models and tokens"
_CARD = {
    "id": MODEL,
    "object": "model",
    "created": CREATED,
    "owned_by": "quire",
    "root": MODEL,
    "parent": None,
    "max_model_len": 4096,
    "permission": [],
}

ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/models",
        TAG,
        "The models",
        "One entry for each served name. `max_model_len` limits the tokens of prompt and answer together.",
        answer={"object": "list", "data": [_CARD]},
    ),
    Endpoint("GET", "/v1/models/{name}", TAG, "One model", answer=_CARD, statuses=(404,)),
    Endpoint(
        "POST",
        "/tokenize",
        TAG,
        "Convert a text or a conversation to token ids",
        requests={
            "A text": {"model": MODEL, "prompt": "Hello!", "return_token_strs": True},
            "A conversation": {"model": MODEL, "messages": HELLO},
        },
        answer={"count": 2, "max_model_len": 4096, "tokens": [9707, 0], "token_strs": ["Hello", "!"]},
        statuses=(404,),
    ),
    Endpoint(
        "GET",
        "/tokenizer_info",
        TAG,
        "Describe the tokenizer",
        "The special tokens by name, and the chat template.",
        answer={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": 151936,
            "model_max_length": 4096,
            "chat_template": "{% for message in messages %}…",
        },
    ),
    Endpoint(
        "POST",
        "/detokenize",
        TAG,
        "Convert token ids to text",
        requests={"Token ids": {"model": MODEL, "tokens": [1, 2]}},
        answer={"prompt": "Hello!"},
        statuses=(404,),
    ),
)
