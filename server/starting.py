"""The app until the engine is ready, and while the server stops: probes, metrics, the chat page's files, and 503 for
everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from server.chat_page import add_chat_page
from server.http.errors import APIError
from server.http.probes import add_probes
from server.observability.readiness import Readiness

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def add_starting_routes(
    app: FastAPI, readiness: Readiness, registry: CollectorRegistry, page_servers: Sequence[str] = ()
) -> None:
    """Add all routes. `registry`: the metrics that exist so far. `page_servers`: see `add_chat_page`."""
    add_probes(app, readiness)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    add_chat_page(app, page_servers, starting=readiness)

    @app.api_route("/{path:path}", methods=_METHODS, response_model=None)
    async def anything(request: Request) -> Response:
        raise APIError(503, readiness.sentence(), headers=readiness.headers)


class Switch:
    """The ASGI app of the HTTP server: delegates to the starting app until the engine is ready, then to the "
    "engine's."""

    def __init__(self, starting: ASGIApp, readiness: Readiness) -> None:
        self._starting, self._readiness = starting, readiness
        self._app: ASGIApp | None = None  # of the engine
        self._switched = asyncio.Event()

    def switch_to(self, app: ASGIApp) -> None:
        """From now on requests go to the engine's app."""
        self._app = app
        self._switched.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None and self._readiness.is_ready:
            await self._switched.wait()  # the app is being made: a client that was told "ready" is not refused
        app = self._app or self._starting
        if self._readiness.is_draining and scope.get("method") == "POST":  # only running requests may continue
            app = self._starting
        await app(scope, receive, send)
