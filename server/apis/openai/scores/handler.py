"""/score, /rerank and /classify: scores of text pairs, and labels of texts.

A classifier with one label (a cross-encoder) reads both texts of a pair as one prompt. With an embedding model the
score is the cosine similarity of the embeddings.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from engine import Classifier, EmbeddingOutput
from server.apis.openai.scores.protocol import ClassifyRequest, Pair, RerankRequest, ScoreRequest
from server.apis.openai.usage import usage_object
from server.generation.caller import Caller
from server.generation.checks import MAX_SAMPLES
from server.generation.generation import Generation
from server.generation.model import Model
from server.generation.server_state import ServerState
from server.generation.start import embed
from server.http.callers import caller_of
from server.http.errors import APIError
from server.http.reading import converted
from server.http.responses import json_response

MAX_PAIR_CHARS = 1 << 24  # of all pairs for a classifier: one long text may be in thousands of pairs


def add_routes(app: FastAPI, server: ServerState) -> None:
    model = server.model

    @app.post("/score", response_model=None)
    @app.post("/v1/score", response_model=None)
    async def score(body: ScoreRequest, request: Request) -> Response:
        warnings, pairs = await converted(request, body, lambda body: body.pairs)
        generation, scores = await _scores(server, request, body, pairs)
        data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
        return json_response({**_head(generation), "object": "list", "data": data}, warnings)

    @app.post("/rerank", response_model=None)
    @app.post("/v1/rerank", response_model=None)
    @app.post("/v2/rerank", response_model=None)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        warnings, pairs = await converted(request, body, lambda body: body.pairs)
        generation, scores = await _scores(server, request, body, pairs)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        shown = body.return_documents is not False
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": pairs[index][1]}} if shown else {})
            for index in best
        ]
        head = {**_head(generation), "id": f"rerank-{generation.id.removeprefix('score-')}"}
        return json_response({**head, "results": results}, warnings)

    @app.post("/classify", response_model=None)
    @app.post("/v1/classify", response_model=None)
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        classifier = await _classifier(model, body.model, caller_of(request))
        warnings, asked = await converted(request, body, lambda body: body.neutral(classifier.pooling))
        generation = await embed(server, asked, caller_of(request))
        states = await generation.embeddings()
        found = await model.in_thread(_activated, classifier, states, body.is_activated, tenant=generation.tenant)
        data = [
            {
                "index": index,
                "label": classifier.best(probs),
                "probs": probs,
                "num_classes": len(probs),
            }
            for index, probs in enumerate(found)
        ]
        return json_response({**_head(generation), "object": "list", "data": data}, warnings)


async def _classifier(model: Model, name: str | None, caller: Caller) -> Classifier:
    found, shown = await model.classifier(name, caller), name or model.names[0]
    if found is None:
        reason = f"The model `{shown}` is no classifier. Serve a model published as …ForSequenceClassification."
        raise APIError(400, reason, "model", lead=None)
    if found.labels_tokens:
        raise APIError(400, f"The model `{shown}` labels tokens. Use /pooling.", "model", lead=None)
    return found


async def _scores(
    server: ServerState, request: Request, body: ScoreRequest | RerankRequest, pairs: list[Pair]
) -> tuple[Generation, list[float]]:
    """Return the score of each pair. Raises `APIError` if the model cannot score pairs."""
    model = server.model
    classifier, name = await model.classifier(body.model, caller_of(request)), body.model or model.names[0]
    if classifier is None and model.info.generates:
        reason = f"The model `{name}` generates text. Scores need an embedding model or a classifier with one label."
        raise APIError(400, reason, "model", lead=None)
    if classifier is not None and (num_labels := len(classifier.labels)) != 1:
        reason = f"The model `{name}` has {num_labels} labels, and scores require a single label. Use /classify."
        raise APIError(400, reason, "model", lead=None)
    field = "documents" if isinstance(body, RerankRequest) else "text_2"
    if len(pairs) > MAX_SAMPLES:  # equal texts are embedded once, but every pair is scored
        raise APIError(400, f"must be at most {MAX_SAMPLES} texts, got {len(pairs)}", field, lead=" ")
    if classifier is not None and (num_chars := sum(len(one) + len(other) for one, other in pairs)) > MAX_PAIR_CHARS:
        reason = f"must make pairs of at most {MAX_PAIR_CHARS} characters in total, got {num_chars}"
        raise APIError(400, reason, field, lead=" ")
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    prompts, pooling = (texts, None) if classifier is None else (pairs, classifier.pooling)
    generation = await embed(server, body.hidden_states(prompts, {"prompt": field}, pooling), caller_of(request))
    states, tenant = await generation.embeddings(), generation.tenant
    if classifier is None:
        return generation, await model.in_thread(_cosines, texts, states, pairs, tenant=tenant)
    found = await model.in_thread(_activated, classifier, states, body.is_activated, tenant=tenant)
    return generation, [scores[0] for scores in found]


def _activated(classifier: Classifier, states: list[bytes], is_activated: bool) -> list[list[float]]:
    """Return the scores of each prompt. `states`: the last hidden state of each prompt."""
    return [classifier.scores(EmbeddingOutput.read(each).embedding, activated=is_activated) for each in states]


def _cosines(texts: list[str], embeddings: list[bytes], pairs: list[Pair]) -> list[float]:
    """Return the cosine similarity of each pair. `embeddings`: those of `texts`, normalised to length 1."""
    vectors = {text: EmbeddingOutput.read(each) for text, each in zip(texts, embeddings, strict=True)}
    return [vectors[first].similarity(vectors[second]) for first, second in pairs]


def _head(generation: Generation) -> dict[str, object]:
    return {
        "id": generation.id,
        "created": generation.created,
        "model": generation.model,
        "usage": usage_object(generation.usage),
    }
