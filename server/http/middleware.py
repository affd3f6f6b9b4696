"""Middleware: metrics of HTTP requests, and request ids."""

from __future__ import annotations

import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.sse import DIRECT_SEND
from server.metrics import Metrics

_METHODS = frozenset(["GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"])


class HTTPMetricsMiddleware:
    """Counts and times HTTP requests by the route that took them."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500
        scope[DIRECT_SEND] = send

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            handler = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"  # clients may invent methods
            self._metrics.http_requests.labels(method, f"{status // 100}xx", handler).inc()
            self._metrics.http_seconds.labels(method, handler).observe(time.perf_counter() - start)


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
