"""/pooling: embeddings, labels of texts, or labels of tokens, whichever the model computes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from engine import Classifier, EmbeddingOutput
from server.apis.openai.pooling.protocol import PoolingRequest, Task
from server.apis.openai.usage import usage_object
from server.generation.server_state import ServerState
from server.generation.start import embed
from server.http.callers import caller_of
from server.http.errors import APIError
from server.http.reading import converted
from server.http.responses import json_response


def add_routes(app: FastAPI, server: ServerState) -> None:
    model = server.model

    @app.post("/pooling", response_model=None)
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        classifier = await model.classifier(body.model, caller_of(request))
        _check_task(classifier, body.model or model.names[0], body.task)
        kind = None if classifier is None else classifier.pooling
        warnings, asked = await converted(request, body, lambda body: body.neutral(kind))
        generation = await embed(server, asked, caller_of(request))
        states = await generation.embeddings()
        is_activated = body.use_activation is not False
        found = await model.in_thread(_outputs, classifier, states, is_activated, tenant=generation.tenant)
        answer = {
            "id": generation.id,
            "object": "list",
            "created": generation.created,
            "model": generation.model,
            "data": [{"index": index, "object": "pooling", "data": each} for index, each in enumerate(found)],
            **({} if classifier is None else {"labels": classifier.labels}),
            "usage": usage_object(generation.usage),
        }
        return json_response(answer, warnings)


def _check_task(classifier: Classifier | None, name: str, task: Task | None) -> None:
    """Raise `APIError` if the model of this name does not do what is expected."""
    does: Task = "embed" if classifier is None else "token_classify" if classifier.labels_tokens else "classify"
    if task not in (None, does):
        raise APIError(400, f"must be {does} for the model `{name}`, got {task!r}", "task", lead=" ")


def _outputs(classifier: Classifier | None, states: list[bytes], is_activated: bool) -> list[Any]:
    """Return each prompt's embedding, scores, or scores of its tokens."""
    found = [EmbeddingOutput.read(each).embedding for each in states]
    if classifier is None:
        return found
    if not classifier.labels_tokens:
        return [classifier.scores(each, activated=is_activated) for each in found]
    size = len(classifier.labels)
    return [
        [classifier.scores(each[at : at + size], activated=is_activated) for at in range(0, len(each), size)]
        for each in found
    ]
