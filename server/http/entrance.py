"""Finds the tenant of a request before any work is done for it. Requests of different tenants start alternately."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from server.generation.caller import Caller
from server.http.auth import PROBES, key_of
from server.http.callers import caller_in

FindCaller = Callable[[bytes], Caller | None]  # finds a caller by its key
BEGIN_AT_ONCE = 1  # requests started in one iteration of the event loop, which takes a millisecond or two


class Entrance:
    """Finds the tenants of requests. Refuses nothing."""

    def __init__(self, find_caller: FindCaller | None = None) -> None:
        """`find_caller`: None if the server requires no keys."""
        self._find_caller = find_caller
        proxies = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")  # uvicorn's default
        self._as_forwarded = ProxyHeadersMiddleware(_nothing, proxies)

    def tenant(self, scope: Scope) -> str | None:
        """Return the tenant of a request, as `Caller.tenant`; None for probes, which never wait."""
        if scope["path"].removeprefix(scope.get("root_path", "")) in PROBES:
            return None
        caller = self._find_caller(key_of(scope)) if self._find_caller is not None else None
        if caller is None:
            with contextlib.suppress(StopIteration):  # it never waits
                # uvicorn has types of its own
                self._as_forwarded(scope, _nothing, _nothing).send(None)  # type: ignore[arg-type]
            caller = caller_in(scope)
        return caller.tenant("")


async def _nothing(*args: Any) -> None: ...
