"""Rate limits at the door: requests beyond them are refused, and OpenAI's `x-ratelimit-*` headers are added."""

from __future__ import annotations

import math

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.generation.caller import Caller
from server.generation.errors import RateLimitError
from server.generation.rate_limits import Limits
from server.http.callers import caller_in
from server.http.errors import ErrorFormats


class RateLimitMiddleware:
    """Refuses POST requests beyond a caller's limits before reading them, and adds rate-limit headers to responses."""

    def __init__(self, app: ASGIApp, limits: Limits, formats: ErrorFormats) -> None:
        self._app, self._limits, self._formats = app, limits, formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = caller_in(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if caller is None or (caller.requests_per_minute is None and caller.tokens_per_minute is None):
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(await self._headers(caller))
            await send(message)

        try:
            await self._limits.begin(caller)
        except RateLimitError as error:
            await self._formats.response(error, scope["path"])(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)

    async def _headers(self, caller: Caller) -> dict[str, str]:
        found = {}
        for each in await self._limits.remaining(caller):
            found[f"x-ratelimit-limit-{each.kind}"] = str(each.per_minute)
            found[f"x-ratelimit-remaining-{each.kind}"] = str(each.left)
            found[f"x-ratelimit-reset-{each.kind}"] = _duration(each.seconds_until_full)
        return found


def _duration(seconds: float) -> str:
    """Format a duration as OpenAI does: 20ms, 8.64s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, seconds = divmod(seconds, 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{round(seconds, 2):g}s"
