"""The API reference of /inference/v1/generate."""

from __future__ import annotations

from server.apis.endpoint import CREATED, MODEL, USAGE, Endpoint

TAG = "Text"

ENDPOINTS = (
    Endpoint(
        "POST",
        "/inference/v1/generate",
        TAG,
        "Continue token ids",
        "vLLM's endpoint for clients with their own tokenizer, such as trainers. `sampling_params` has the sampling "
        "parameters of completions. `max_tokens` defaults to as many as fit.",
        {
            "An answer": {"model": MODEL, "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}},
            "With log probabilities": {
                "model": MODEL,
                "token_ids": [1, 2, 3],
                "sampling_params": {"max_tokens": 8, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
            },
            "A stream": {
                "model": MODEL,
                "token_ids": [1, 2],
                "sampling_params": {"max_tokens": 8, "n": 2},
                "stream": True,
            },
        },
        {
            "request_id": "generate-tokens-90aa",
            "model": MODEL,
            "created": CREATED,
            "choices": [{"index": 0, "logprobs": None, "finish_reason": "length", "token_ids": [9, 8, 7]}],
            "usage": USAGE,
            "prompt_logprobs": None,
        },
        events='data: {"request_id":"generate-tokens-90aa","choices":[{"index":0,"logprobs":null,"finish_reason":null,'
        '"token_ids":[9]}]}\n\ndata: [DONE]\n\n',
        statuses=(404,),
    ),
)
