"""API keys: the paths that they guard and the headers that carry them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import APIError, ErrorFormats

GUARDED = "/v1"


class APIKeyMiddleware:
    """Requests below /v1 must bring one of `keys` as `Authorization: Bearer KEY`; a browser's preflight need not.

    Anthropic's clients may bring it as `x-api-key: KEY`.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], formats: ErrorFormats) -> None:
        self._app, self._formats = app, formats
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and self._guards(scope) and not self._opens(scope):
            response: Response = JSONResponse({"error": "Unauthorized"}, 401)
            if self._formats.has_own(scope["path"]):
                response = self._formats.response(APIError(401, "Unauthorized"), scope["path"])
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    @staticmethod
    def _guards(scope: Scope) -> bool:
        path = scope["path"]
        return any(f"{p}/".startswith(f"{GUARDED}/") for p in (path, path.removeprefix(scope.get("root_path", ""))))

    def _opens(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        given = key.strip().encode("latin-1")
        return any(secrets.compare_digest(given, known) for known in self._keys)
