"""OpenAI endpoints for other kinds of models: answered with an explanation instead of a bare 404."""

from __future__ import annotations

from fastapi import FastAPI, Request

from server.apis.api import API
from server.generation.server_state import ServerState
from server.http.errors import APIError

_KINDS = {"audio": "it supports no audio", "images": "it makes no images", "videos": "it makes no videos"}


def add_routes(app: FastAPI, server: ServerState) -> None:
    async def refuse(request: Request) -> None:
        kind = request.scope["route"].path.split("/")[2]
        raise APIError(
            501,
            f"The model `{server.model.names[0]}` reads and writes text: {_KINDS[kind]}. Use another server for "
            f"/v1/{kind}.",
            headers={"x-should-retry": "false"},  # otherwise OpenAI's clients retry
        )

    for kind in _KINDS:
        app.add_api_route(f"/v1/{kind}/{{path:path}}", refuse, methods=["GET", "POST"], include_in_schema=False)


api = API(add_routes, ())
