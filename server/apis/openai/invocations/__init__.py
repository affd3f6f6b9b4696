"""/invocations: the one path that Amazon SageMaker sends requests to. The body's fields say which endpoint it is
for.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Discriminator, Tag

from server.apis.api import API
from server.apis.openai.chat.protocol import ChatCompletionRequest
from server.apis.openai.completions.protocol import CompletionRequest
from server.apis.openai.embeddings.protocol import EmbeddingTextRequest
from server.generation.server_state import ServerState

_PATHS: dict[type[Any], str] = {
    ChatCompletionRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    EmbeddingTextRequest: "/v1/embeddings",
}


def _kind(body: Any) -> str:
    """Return the tag of a body's type; a body without the field of any is taken for a chat, which then lacks
    messages.
    """
    given = body if isinstance(body, dict) and "messages" not in body else {}
    return "completion" if "prompt" in given else "embeddings" if "input" in given else "chat"


Invocation = Annotated[
    Annotated[ChatCompletionRequest, Tag("chat")]
    | Annotated[CompletionRequest, Tag("completion")]
    | Annotated[EmbeddingTextRequest, Tag("embeddings")],
    Discriminator(_kind),
]


def add_routes(app: FastAPI, server: ServerState) -> None:
    """Add the route. Call it after the routes of the endpoints that it passes requests on to."""
    endpoints = {getattr(route, "path", ""): getattr(route, "endpoint", None) for route in app.routes}

    @app.post("/invocations", response_model=None, include_in_schema=False)
    async def invoke(body: Invocation, request: Request) -> Response:
        endpoint: Any = endpoints[_PATHS[type(body)]]
        response: Response = await endpoint(body=body, request=request)
        return response


api = API(add_routes, ())
