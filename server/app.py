"""The HTTP application: all APIs, the API reference, the chat page, middleware."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

import engine as quire
from server.apis import anthropic, ollama, service
from server.apis.openai import (
    adapters,
    chat,
    completions,
    embeddings,
    generate,
    invocations,
    models,
    not_served,
    pooling,
    responses,
    scores,
)
from server.apis.openai.errors import error_body
from server.chat_page import add_chat_page
from server.docs.openapi import add_reference
from server.generation.engine_client import EngineClient
from server.generation.model import Model
from server.generation.rate_limits import Limits
from server.generation.server_state import ServerState
from server.generation.siblings import MergedRegistry, Siblings
from server.generation.workers import Workers
from server.http.auth import APIKeyMiddleware
from server.http.browsers import BrowserMiddleware, PreflightMiddleware
from server.http.errors import ErrorFormats, add_error_handlers
from server.http.limits import default_body_bytes
from server.http.middleware import FairMiddleware, RequestMiddleware
from server.http.rate_limits import RateLimitMiddleware
from server.http.reading import Bodies, StrictJSONRoute
from server.metrics import Metrics, log_statistics
from server.observability.readiness import Readiness
from server.observability.server_metrics import ServerMetrics
from server.settings import ServerConfig
from server.starting import add_starting_routes

if TYPE_CHECKING:
    from server.observability.tracing import Traces

APIS = (
    chat.api,
    completions.api,
    generate.api,
    responses.api,
    anthropic.api,
    ollama.api,
    embeddings.api,
    pooling.api,
    scores.api,
    models.api,
    adapters.api,
    not_served.api,
    invocations.api,
    service.api,
)


def create_app(
    engine: EngineClient,
    settings: ServerConfig,
    *,
    served_model_names: Sequence[str] = (),
    log_stats: bool = True,
    kv_cache_dtype: str = "auto",
    readiness: Readiness | None = None,
    server_metrics: ServerMetrics | None = None,
    siblings: Siblings | None = None,
) -> FastAPI:
    """Create the app that serves a running `engine`. It neither starts nor closes the engine.

    `served_model_names`: the names that clients may use, by default the engine's; answers have the requested name.
    `log_stats`: log statistics at intervals. `kv_cache_dtype`: its name in the metrics. `readiness`, `server_metrics`:
    those of `create_starting_app`, if there was one. `siblings`: shared by the apps of several models.

    Raises `ConfigError` if the chat template in `settings` is invalid.
    """
    names = list(served_model_names) or [engine.model.name]
    readiness = readiness or Readiness(engine)
    server_metrics = server_metrics or ServerMetrics(engine)
    registry = server_metrics.registry
    if siblings is not None:
        registry = siblings.registries[names[0]] = CollectorRegistry()
    sizes = {"max_model_len": engine.model.max_model_len, "block_size": engine.block_size}
    metrics = Metrics(registry, names[0], engine.replicas, **sizes, cache_dtype=kv_cache_dtype)
    workers = _workers(engine, settings)
    server = ServerState(Model(engine, settings, names, workers), settings, metrics, readiness, siblings)
    server.exposed = server_metrics.registry if siblings is None else _merged(server_metrics, siblings)
    traces = _traces(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.model.adapters.load_configured()
        log_interval = settings.log_stats_interval if log_stats else None
        async with _background_tasks(engine, server_metrics if siblings is None else None, log_interval):
            try:
                yield
            finally:
                workers.close()
                server.close()
                if traces is not None:
                    await traces.close()

    app = FastAPI(title="Quire", version=quire.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = StrictJSONRoute
    reads_images = engine.model.images is not None
    max_body_bytes = settings.max_body_bytes or default_body_bytes(
        engine.model.max_model_len, reads_images=reads_images
    )
    app.state.server = server
    app.state.bodies = Bodies(max_body_bytes, settings.body_timeout, workers, strict=settings.strict)
    _add_middleware(app, settings, server_metrics, traces, server.rate_limits)
    for api in APIS:
        api.add_routes(app, server)
    add_reference(app, APIS, names[0])
    add_chat_page(app, settings.page_servers)
    return app


@contextlib.asynccontextmanager
async def _background_tasks(
    engine: EngineClient, server_metrics: ServerMetrics | None, log_interval: float | None
) -> AsyncIterator[None]:
    """Run the background tasks. `server_metrics`: None: another app's task updates them. `log_interval`: seconds
    between lines of statistics; None: no such lines.
    """
    tasks = [] if server_metrics is None else [asyncio.create_task(server_metrics.lag.watch())]
    if log_interval is not None:
        tasks.append(asyncio.create_task(log_statistics(lambda: engine.stats, log_interval)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


def create_starting_app(settings: ServerConfig, readiness: Readiness, server_metrics: ServerMetrics) -> FastAPI:
    """Create the app that runs until the engine is ready."""
    app = FastAPI(title="Quire", openapi_url=None)
    _add_middleware(app, settings, server_metrics)
    add_starting_routes(app, readiness, server_metrics.registry, settings.page_servers)
    return app


def error_formats() -> ErrorFormats:
    """Return the error format of each API's paths."""
    own_errors = {path: api.errors.body for api in APIS if api.errors is not None for path in api.errors.below}
    return ErrorFormats(error_body, own_errors)


def guarded(app: ASGIApp, settings: ServerConfig) -> ASGIApp:
    """Return an app that refuses other sites' pages before `app`, if the server needs no keys."""
    if settings.read_keys() is not None:
        return app
    return BrowserMiddleware(app, error_formats(), **_browser_limits(settings))


def _browser_limits(settings: ServerConfig) -> dict[str, Sequence[str]]:
    # A Unix socket is behind a proxy, which may pass on any host name; browsers cannot reach the socket.
    hosts = ("*",) if settings.uds else (*settings.allowed_hosts, settings.host)
    return {"allowed_hosts": hosts, "allowed_origins": settings.allowed_origins}


def _merged(server_metrics: ServerMetrics, siblings: Siblings) -> MergedRegistry:
    return MergedRegistry(lambda: [server_metrics.registry, *siblings.registries.values()])


def _workers(engine: EngineClient, settings: ServerConfig) -> Workers:
    """Return the threads of this process. API processes divide those for images, and the memory for these."""
    if engine.model.images is not None:
        engine.model.images.share(settings.api_server_count)
    return Workers(settings.api_server_count)


def _traces(settings: ServerConfig) -> Traces | None:
    if settings.otlp_traces_endpoint is None:
        return None
    from server.observability.tracing import Traces  # OpenTelemetry is optional

    return Traces(settings.otlp_traces_endpoint)


def _add_middleware(
    app: FastAPI,
    settings: ServerConfig,
    server_metrics: ServerMetrics,
    traces: Traces | None = None,
    rate_limits: Limits | None = None,
) -> None:
    """Add the middleware, from the innermost to the outermost, and the error handlers."""
    formats = error_formats()
    add_error_handlers(app, formats)
    app.add_middleware(FairMiddleware)
    if (keys := settings.read_keys()) is not None:
        if rate_limits is not None:
            app.add_middleware(RateLimitMiddleware, limits=rate_limits, formats=formats)
        app.add_middleware(APIKeyMiddleware, find_caller=keys.find, formats=formats, open_metrics=settings.open_metrics)
    else:
        app.add_middleware(BrowserMiddleware, formats=formats, **_browser_limits(settings))
    if settings.allowed_origins:
        app.add_middleware(
            PreflightMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    if traces is not None:
        app.add_middleware(traces.middleware)
    app.add_middleware(RequestMiddleware, metrics=server_metrics.http, answers_id=settings.enable_request_id_headers)
