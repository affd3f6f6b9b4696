"""The outermost middleware: metrics of HTTP requests, their ids, and the context in which they are worked on."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.context import CURRENT, new_context
from server.http.sse import DIRECT_SEND
from server.metrics import HTTPMetrics

_METHODS = frozenset(["GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"])


class RequestMiddleware:
    """Counts and times HTTP requests by the route that took them; sets their `RequestContext`."""

    def __init__(self, app: ASGIApp, metrics: HTTPMetrics, answers_id: bool) -> None:
        """`answers_id`: whether answers have an X-Request-Id header."""
        self._app, self._metrics, self._answers_id = app, metrics, answers_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context, status = new_context(scope), 500
        if self._answers_id:
            context.headers = [(b"x-request-id", context.id.encode())]
        scope[DIRECT_SEND] = send
        CURRENT.set(context)  # for all of the task, which works on this request alone: also what reports its failure

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *context.headers]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            handler = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"  # clients may invent methods
            self._metrics.see(method, status, handler, time.monotonic() - context.received)
