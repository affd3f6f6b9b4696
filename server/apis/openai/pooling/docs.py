"""The API reference of /pooling."""

from __future__ import annotations

from server.apis.endpoint import CREATED, MODEL, USAGE, Endpoint

ENDPOINTS = (
    Endpoint(
        "POST",
        "/pooling",
        "Scores",
        "Compute what the model computes for texts",
        "As in vLLM. A model that labels tokens (…ForTokenClassification) gives a list of probabilities for each token "
        "of a text, in the order of `labels`; a classifier of texts one list; an embedding model its embedding. `task` "
        "may say which is expected.",
        {
            "Labels of tokens": {"model": MODEL, "input": "Ada Lovelace"},
            "An embedding": {"model": MODEL, "input": ["One", "Two"], "task": "embed"},
        },
        {
            "id": "pool-41f0",
            "object": "list",
            "created": CREATED,
            "model": MODEL,
            "data": [{"index": 0, "object": "pooling", "data": [0.6, -0.8]}],
            "usage": {**USAGE, "completion_tokens": 0, "total_tokens": 9},
        },
        statuses=(404, 409),
    ),
)
