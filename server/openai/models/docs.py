"""What the API reference says of /v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from server.docs.endpoint import CREATED, HELLO, MODEL, Endpoint

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
        "Every name that the model is served by is one; `max_model_len` is the most tokens of prompt and answer.",
        answer={"object": "list", "data": [_CARD]},
    ),
    Endpoint("GET", "/v1/models/{name}", TAG, "One model", answer=_CARD, statuses=(404,)),
    Endpoint(
        "POST",
        "/tokenize",
        TAG,
        "Text or a conversation to token ids",
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
        "What the tokenizer is",
        "Its special tokens, each by its name, and the chat template.",
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
        "Token ids to text",
        requests={"Token ids": {"model": MODEL, "tokens": [1, 2]}},
        answer={"prompt": "Hello!"},
        statuses=(404,),
    ),
)
