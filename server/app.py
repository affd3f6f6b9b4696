"""The HTTP application: which path leads where. Knows endpoints and middleware; sampling, text and events are elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import engine as quire
from server.anthropic.routes import add_routes as add_anthropic_routes
from server.docs.openapi import add_reference
from server.generation.served_model import EngineClient, Serving
from server.http.auth import APIKeyMiddleware
from server.http.bodies import StrictJSONRoute
from server.http.errors import add_error_handlers
from server.metrics import HTTPMetricsMiddleware, Metrics, log_statistics
from server.openai.responses.routes import add_routes as add_response_routes
from server.openai.routes import add_routes as add_openai_routes
from server.settings import ServerConfig

STATIC = Path(__file__).resolve().parent / "static"


def create_app(
    engine: EngineClient,
    settings: ServerConfig,
    *,
    served_model_names: Sequence[str] = (),
    log_stats: bool = True,
    kv_cache_dtype: str = "auto",
) -> FastAPI:
    """The app that serves a running `engine`; it neither starts nor closes it.

    `served_model_names`: all names that clients may use, else the engine's; answers bear the one that was asked for.
    `log_stats`: write a line of statistics now and then. `kv_cache_dtype`: as the metrics name it. `ConfigError` when the
    chat template in `settings` is broken.
    """
    names = list(served_model_names) or [engine.model_name]
    metrics = Metrics(
        names[0],
        lambda: engine.stats,
        max_model_len=engine.max_model_len,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        cache_dtype=kv_cache_dtype,
    )
    serving = Serving(engine, settings, names, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        log = log_statistics(lambda: engine.stats, settings.log_stats_interval) if log_stats else asyncio.sleep(0)
        task = asyncio.create_task(log)
        try:
            yield
        finally:
            task.cancel()
            serving.close()

    app = FastAPI(title="Quire", version=quire.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = StrictJSONRoute
    add_error_handlers(app)
    if settings.api_keys:
        app.add_middleware(APIKeyMiddleware, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    if settings.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware)
    app.add_middleware(HTTPMetricsMiddleware, metrics=metrics)
    add_openai_routes(app, serving)
    add_response_routes(app, serving)
    add_anthropic_routes(app, serving)
    _add_service(app, serving)
    add_reference(app, names[0])
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app


def _add_service(app: FastAPI, serving: Serving) -> None:
    @app.get("/health", response_model=None)
    @app.head("/health", response_model=None, include_in_schema=False)
    @app.get("/ping", response_model=None)
    @app.head("/ping", response_model=None, include_in_schema=False)
    @app.post("/ping", response_model=None)
    async def health() -> Response:
        return Response(status_code=503 if serving.engine.dead else 200)

    @app.get("/load")
    @app.get("/v1/load")
    async def load() -> dict[str, Any]:
        return serving.load()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": quire.__version__}

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(generate_latest(serving.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_model=None, include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")


class RequestIdMiddleware:
    """Answers with an X-Request-Id header: the client's own, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id") or uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, with_id)
