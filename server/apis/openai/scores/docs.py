"""The API reference of /score, /rerank and /classify."""

from __future__ import annotations

from typing import Any

from server.apis.endpoint import CREATED, MODEL, USAGE, Endpoint

TAG = "Scores"
_USAGE = {**USAGE, "completion_tokens": 0, "total_tokens": 9}
_PLANETS = {"model": MODEL, "query": "a large planet", "documents": ["Jupiter", "a teapot"]}
_RANKED: dict[str, Any] = {
    "id": "rerank-41f0",
    "model": MODEL,
    "usage": _USAGE,
    "results": [{"index": 0, "relevance_score": 0.87, "document": {"text": "Jupiter"}}],
}
_SCORED: dict[str, Any] = {
    "id": "score-41f0",
    "object": "list",
    "created": CREATED,
    "model": MODEL,
    "data": [{"index": 0, "object": "score", "score": 0.87}],
    "usage": _USAGE,
}
_SCORE: tuple[Any, ...] = (
    TAG,
    "Score pairs of texts",
    "A classifier with one label (a cross-encoder) reads both texts as one prompt. With an embedding model the score "
    "is the cosine similarity of the embeddings.",
    {
        "One text with several": {"model": MODEL, "text_1": "a large planet", "text_2": ["Jupiter", "a teapot"]},
        "Pairs": {"model": MODEL, "text_1": ["one", "two"], "text_2": ["1", "2"]},
    },
    _SCORED,
)
_RERANK: tuple[Any, ...] = (
    TAG,
    "Rank documents by relevance to a query",
    "Compatible with Jina's and Cohere's APIs. Results are sorted by score, best first; scores are those of `/score`.",
    {"Documents": _PLANETS, "The best document": {**_PLANETS, "top_n": 1, "return_documents": False}},
    _RANKED,
)
_CLASSIFY: tuple[Any, ...] = (
    TAG,
    "Classify texts",
    "Requires a classification model (…ForSequenceClassification).",
    {"Several texts": {"model": MODEL, "input": ["a fine day", "a dull book"]}},
    {
        "id": "score-41f0",
        "object": "list",
        "created": CREATED,
        "model": MODEL,
        "data": [{"index": 0, "label": "POSITIVE", "probs": [0.1, 0.9], "num_classes": 2}],
        "usage": _USAGE,
    },
)


def _endpoint(path: str, described: tuple[Any, ...]) -> Endpoint:
    tag, summary, description, requests, answer = described
    return Endpoint("POST", path, tag, summary, description, requests, answer, statuses=(404, 409))


ENDPOINTS = (
    *(_endpoint(path, _SCORE) for path in ("/v1/score", "/score")),
    *(_endpoint(path, _RERANK) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
    *(_endpoint(path, _CLASSIFY) for path in ("/classify", "/v1/classify")),
)
