"""The HTTP application: which path leads where. Knows endpoints and middleware; sampling, text and events are elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import engine as quire
from server import sse
from server.auth import APIKeyMiddleware
from server.errors import add_error_handlers
from server.fields import Body, Ignored
from server.metrics import HTTPMetricsMiddleware, Metrics, log_statistics
from server.openai import chat, completions, models
from server.openai.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.openai.serving import EngineClient, Serving
from server.settings import ServerConfig

STATIC = Path(__file__).resolve().parent / "static"
_CLIENT_CLOSED = 499
_T = TypeVar("_T")


def create_app(
    engine: EngineClient,
    settings: ServerConfig,
    *,
    served_model_names: Sequence[str] = (),
    log_stats: bool = True,
) -> FastAPI:
    """The app that serves a running `engine`; it neither starts nor closes it.

    `served_model_names`: all names that clients may use, the first one in answers; else the engine's. `log_stats`: write
    a line of statistics now and then. `ConfigError` when the chat template in `settings` is broken.
    """
    names = list(served_model_names) or [engine.model_name]
    metrics = Metrics(
        names[0],
        lambda: engine.stats,
        max_model_len=engine.max_model_len,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
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

    app = FastAPI(title="Quire", version=quire.__version__, lifespan=lifespan)
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
    _add_api(app, serving)
    _add_service(app, serving)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app


def _add_api(app: FastAPI, serving: Serving) -> None:
    def streamed(events: Any, ignored: Ignored) -> Response:
        settings = serving.settings
        response = sse.stream(
            events, keep_alive=settings.sse_keep_alive_interval, shutdown_timeout=settings.shutdown_timeout
        )
        response.headers.update(ignored.headers)
        return response

    def ignored_in(body: Body) -> Ignored:
        return Ignored(serving.settings.strict).add_fields(body)

    @app.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        working = await chat.begin(serving, body, ignored_in(body))
        if body.stream:
            return streamed(chat.events(serving, body, working), working.ignored)
        return await _unless_gone(request, chat.answer(serving, body, working), working.ignored)

    @app.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        ignored = ignored_in(body)
        generation = await completions.begin(serving, body)
        if body.stream:
            return streamed(completions.events(serving, body, generation, ignored), ignored)
        return await _unless_gone(request, completions.answer(serving, body, generation, ignored), ignored)

    @app.post("/v1/requests/{request_id}/abort")
    async def abort_request(request_id: str) -> dict[str, Any]:
        await serving.abort(request_id)
        return {"id": request_id, "aborted": True}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": models.cards(serving)}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return models.card(serving, name)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        return await models.tokenize(serving, body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        return await models.detokenize(serving, body)


def _add_service(app: FastAPI, serving: Serving) -> None:
    @app.get("/health", response_model=None)
    @app.head("/health", response_model=None, include_in_schema=False)
    @app.get("/ping", response_model=None)
    @app.head("/ping", response_model=None, include_in_schema=False)
    @app.post("/ping", response_model=None)
    async def health() -> Response:
        return Response(status_code=503 if serving.engine.dead else 200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": quire.__version__}

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(generate_latest(serving.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_model=None, include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html")


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, bytes], ignored: Ignored) -> Response:
    """The answer, or its end when the client hangs up before it is complete."""
    working = asyncio.create_task(answer)
    watching = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return Response(working.result(), media_type="application/json", headers=ignored.headers)
        return Response(status_code=_CLIENT_CLOSED)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
