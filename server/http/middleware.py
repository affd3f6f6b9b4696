"""The outermost middleware, which sets the context, ids and metrics of HTTP requests, and the innermost, which lets
requests of different callers start alternately.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.utils.fair_tasks import FairTasks
from server.http.callers import caller_in
from server.http.entrance import BEGIN_AT_ONCE
from server.http.sse import DIRECT_SEND
from server.metrics import HTTPMetrics
from server.observability.context import CURRENT, PREFIX_HEADER, new_context, prefix_note

_METHODS = frozenset(["GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"])


class FairMiddleware:
    """Starts POST requests of different callers alternately, so that a burst of one caller does not delay others.

    Used where requests do not arrive through a `Connection`, as in Ray's replicas.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._fair = app, FairTasks(BEGIN_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._fair.wait(caller_in(scope).tenant(""))
        await self._app(scope, receive, send)


class RequestMiddleware:
    """Sets the `RequestContext` of HTTP requests, and counts and times them by route. HEAD is handled as GET; the
    server omits the body.
    """

    def __init__(self, app: ASGIApp, metrics: HTTPMetrics, answers_id: bool) -> None:
        """`answers_id`: whether responses have an X-Request-Id header."""
        self._app, self._metrics, self._answers_id = app, metrics, answers_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context, status, method = new_context(scope), 500, scope["method"]
        scope["method"] = "GET" if method == "HEAD" else method
        if self._answers_id:
            context.headers = [(b"x-request-id", context.id.encode())]
        scope[DIRECT_SEND] = send
        CURRENT.set(context)  # for the whole task, which handles only this request, including the report of a failure

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, scope["method"] = message["status"], method
                if note := prefix_note():
                    context.headers.append((PREFIX_HEADER.encode(), note.encode()))
                message["headers"] = [*message["headers"], *context.headers]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            del scope[DIRECT_SEND]  # breaks a reference cycle: `send` is a method of the scope's tenant
            handler = getattr(scope.get("route"), "path", "none")
            counted = method if method in _METHODS else "other"  # clients may invent methods
            self._metrics.observe(counted, status, handler, time.monotonic() - context.received)
