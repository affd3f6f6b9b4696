"""The outermost middleware: metrics of HTTP requests, their ids, and the context in which they are worked on. And the
innermost: who may begin.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.turns import Turns
from server.http.callers import caller_in
from server.http.context import CURRENT, new_context
from server.http.entrance import BEGIN_AT_ONCE
from server.http.sse import DIRECT_SEND
from server.metrics import HTTPMetrics

_METHODS = frozenset(["GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"])


class TurnsMiddleware:
    """Lets requests for work in by turns between their callers, so that one's burst does not hold up what others wait for:
    those that come by no `Connection`, as in Ray's replicas.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._turns = app, Turns(BEGIN_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._turns.wait(caller_in(scope).owner(""))
        await self._app(scope, receive, send)


class RequestMiddleware:
    """Counts and times HTTP requests by the route that took them; sets their `RequestContext`. HEAD is answered as GET: the
    server leaves the body out.
    """

    def __init__(self, app: ASGIApp, metrics: HTTPMetrics, answers_id: bool) -> None:
        """`answers_id`: whether answers have an X-Request-Id header."""
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
        CURRENT.set(context)  # for all of the task, which works on this request alone: also what reports its failure

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, scope["method"] = message["status"], method
                message["headers"] = [*message["headers"], *context.headers]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            del scope[DIRECT_SEND]  # a method of what holds the scope: else both would wait for the collector
            handler = getattr(scope.get("route"), "path", "none")
            counted = method if method in _METHODS else "other"  # clients may invent methods
            self._metrics.see(counted, status, handler, time.monotonic() - context.received)
