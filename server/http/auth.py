"""API keys: the paths that require one, and the headers that carry it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.generation.caller import Caller
from server.http.callers import caller_in, set_caller
from server.http.errors import APIError, ErrorFormats

# Health checks. They reveal nothing about requests.
PROBES = frozenset(["/health", "/livez", "/ping", "/readyz"])
# Browsers cannot send a Bearer token when they open a page. These pages ask for a password: the key.
PAGES = frozenset(["/docs", "/metrics", "/openapi.json"])


def is_open(path: str) -> bool:
    """Return whether a path needs no key: probes, and the files of the chat page, which asks for the key itself."""
    return path in PROBES or path == "/" or path.startswith("/static/")


class APIKeyMiddleware:
    """Requires a key, as `Authorization: Bearer KEY` or, as Anthropic's clients send it, `x-api-key: KEY`.

    GET and HEAD requests may also send it as the password of HTTP Basic authentication. Browsers add that password on
    their own, also to requests of other sites' pages, so it must never allow changes. CORS preflights need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        find_caller: Callable[[bytes], Caller | None],
        formats: ErrorFormats,
        *,
        open_metrics: bool,
    ) -> None:
        """`find_caller`: finds the caller of a key. `open_metrics`: /metrics needs no key."""
        self._app, self._find_caller, self._formats = app, find_caller, formats
        self._open_metrics = open_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        caller = self._find_caller(key_of(scope))
        if caller is not None:
            set_caller(scope, caller)
        elif not is_open(path) and not (path == "/metrics" and self._open_metrics):
            opens_page = path in PAGES and Headers(scope=scope).get("sec-fetch-mode", "navigate") == "navigate"
            await self._refusal(scope["path"], asks_for_password=opens_page)(scope, receive, send)
            return
        else:
            set_caller(scope, replace(caller_in(scope), may_prioritise=False, is_admin=False))
        await self._app(scope, receive, send)

    def _refusal(self, full_path: str, *, asks_for_password: bool) -> Response:
        """Return a 401. `asks_for_password`: let a browser ask for the key; not if a script of the chat page sent the
        request.
        """
        response: Response = JSONResponse({"error": "Unauthorized"}, 401)
        if self._formats.has_own(full_path):
            response = self._formats.response(APIError(401, "Unauthorized"), full_path)
        basic = 'Basic realm="Quire: the password is the API key", charset="UTF-8"'
        response.headers["WWW-Authenticate"] = basic if asks_for_password else "Bearer"
        return response


def key_of(scope: Scope) -> bytes:
    """Return the key in a request's headers, or b"" if there is none."""
    headers = Headers(scope=scope)
    scheme, _, given = headers.get("authorization", "").partition(" ")
    match scheme.lower():
        case "bearer":
            pass
        case "basic" if scope["method"] in ("GET", "HEAD"):
            try:
                user, _, password = base64.b64decode(given.strip(), validate=True).partition(b":")
            except (binascii.Error, ValueError):
                return b""
            return password or user
        case _:
            given = headers.get("x-api-key", "")
    return given.strip().encode("latin-1")
