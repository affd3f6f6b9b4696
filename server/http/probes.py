"""Probes of load balancers and orchestrators."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from server.http.sse import event
from server.observability.readiness import Readiness


def add_probes(app: FastAPI, readiness: Readiness) -> None:
    """Add /livez, /readyz, and vLLM's /health and /ping."""

    @app.get("/livez", response_model=None)
    @app.head("/livez", response_model=None, include_in_schema=False)
    async def livez() -> Response:
        return Response()

    @app.get("/readyz", response_model=None)
    @app.head("/readyz", response_model=None, include_in_schema=False)
    async def readyz(request: Request) -> Response:
        if "text/event-stream" in request.headers.get("accept", ""):
            return StreamingResponse(_events(readiness), media_type="text/event-stream; charset=utf-8")
        return _answer(readiness, True)

    @app.get("/health", response_model=None)
    @app.head("/health", response_model=None, include_in_schema=False)
    @app.get("/ping", response_model=None)
    @app.head("/ping", response_model=None, include_in_schema=False)
    @app.post("/ping", response_model=None)
    async def health(request: Request) -> Response:
        return _answer(readiness, "application/json" in request.headers.get("accept", ""), readiness.is_asleep)


def _answer(readiness: Readiness, tells: bool, is_well: bool = False) -> Response:
    """Return the response of a probe. `tells`: with a body. `is_well`: although no requests are taken."""
    content = json.dumps(readiness.as_dict()) if tells else None
    media_type = "application/json" if tells else None
    if readiness.is_ready or is_well:
        return Response(content, media_type=media_type)
    return Response(content, 503, readiness.headers, media_type)


async def _events(readiness: Readiness) -> AsyncGenerator[bytes, None]:
    async for state in readiness.events():
        yield event(json.dumps(state).encode())
