"""API keys: the paths that they guard and the headers that carry them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.callers import Caller, set_caller
from server.http.errors import APIError, ErrorFormats

# For what watches the server: they tell nothing of requests.
PROBES = frozenset(["/health", "/livez", "/ping", "/readyz"])
# Read in browsers, which cannot send a Bearer token when they open a page: these ask for a password, the key.
PAGES = frozenset(["/docs", "/metrics", "/openapi.json"])


def is_open(path: str) -> bool:
    """Whether a path needs no key: probes, and the files of the chat page, which asks for the key itself."""
    return path in PROBES or path == "/" or path.startswith("/static/")


class APIKeyMiddleware:
    """Requests must bring a key, as `Authorization: Bearer KEY` or, as Anthropic's clients have it, `x-api-key: KEY`.

    What only reads may bring it as the password of HTTP Basic authentication. Browsers send that on their own, also for
    pages of other sites: it must not open anything that changes something. A preflight needs no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        find_caller: Callable[[bytes], Caller | None],
        formats: ErrorFormats,
        *,
        open_metrics: bool,
    ) -> None:
        """`find_caller`: the caller of a key. `open_metrics`: /metrics needs none."""
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
        await self._app(scope, receive, send)

    def _refusal(self, full_path: str, *, asks_for_password: bool) -> Response:
        """401. `asks_for_password`: a browser is to ask, which it must not when a script of the chat page reads a page."""
        response: Response = JSONResponse({"error": "Unauthorized"}, 401)
        if self._formats.has_own(full_path):
            response = self._formats.response(APIError(401, "Unauthorized"), full_path)
        basic = 'Basic realm="Quire: the password is the API key", charset="UTF-8"'
        response.headers["WWW-Authenticate"] = basic if asks_for_password else "Bearer"
        return response


def key_of(scope: Scope) -> bytes:
    """The key that a request brings; empty: none."""
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
