"""The API reference of /v1/completions."""

from __future__ import annotations

from server.apis.endpoint import CREATED, MODEL, USAGE, Endpoint

TAG = "Text"

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/completions",
        TAG,
        "Continue a text",
        "`prompt` is a string, token ids, or a list of either. Each prompt gets `n` answers.",
        {
            "An answer": {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 20},
            "Several prompts": {"model": MODEL, "prompt": ["One", "Two"], "n": 2, "stop": ["\n"]},
            "Token ids": {"model": MODEL, "prompt": [1, 2, 3], "logprobs": 2},
            "A stream": {"model": MODEL, "prompt": "Once upon a time", "stream": True, "echo": True},
        },
        {
            "id": "cmpl-90aa",
            "object": "text_completion",
            "created": CREATED,
            "model": MODEL,
            "choices": [
                {"index": 0, "text": " there was", "logprobs": None, "finish_reason": "length", "stop_reason": None}
            ],
            "usage": USAGE,
        },
        events='data: {"id":"cmpl-90aa","object":"text_completion","created":1767225600,"model":"MODEL","choices":'
        '[{"index":0,"text":" there","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\ndata: [DONE]\n\n',
        statuses=(404,),
    ),
)
