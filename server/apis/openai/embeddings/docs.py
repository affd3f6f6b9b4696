"""The API reference of /v1/embeddings."""

from __future__ import annotations

from server.apis.endpoint import CREATED, HELLO, MODEL, USAGE, Endpoint

TAG = "Embeddings"

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/embeddings",
        TAG,
        "Compute embeddings",
        "An embedding is the final hidden state of the last token, or the mean of all tokens (`pooling`). `input` is "
        "a string, token ids, or a list of either. Models that were not trained for embeddings give poor vectors.",
        {
            "A text": {"model": MODEL, "input": "Once upon a time"},
            "Several texts": {"model": MODEL, "input": ["One", "Two"], "encoding_format": "base64"},
            "Token ids": {"model": MODEL, "input": [[1, 2, 3], [4]], "pooling": "mean"},
            "A conversation": {"model": MODEL, "messages": HELLO},
        },
        {
            "id": "embd-41f0",
            "object": "list",
            "created": CREATED,
            "data": [{"index": 0, "object": "embedding", "embedding": [0.6, -0.8]}],
            "model": MODEL,
            "usage": {**USAGE, "completion_tokens": 0, "total_tokens": 9},
        },
        statuses=(404, 409),
    ),
)
