"""Who sends a request, before anything is done for it: requests begin by turns between their owners."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from server.http.auth import PROBES, key_of
from server.http.callers import Caller, caller_in

FindCaller = Callable[[bytes], Caller | None]  # by the key
BEGIN_AT_ONCE = 1  # requests, in one iteration of the event loop: a millisecond or two


class Entrance:
    """Says whose a request is. It refuses nothing."""

    def __init__(self, find_caller: FindCaller | None = None) -> None:
        """`find_caller`: None where no keys are asked for."""
        self._find_caller = find_caller
        proxies = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")  # as uvicorn has it
        self._as_forwarded = ProxyHeadersMiddleware(_nothing, proxies)

    def owner(self, scope: Scope) -> str | None:
        """Of the request, as of `Caller.owner`; None: it does not wait, as what watches the server."""
        if scope["path"].removeprefix(scope.get("root_path", "")) in PROBES:
            return None
        caller = self._find_caller(key_of(scope)) if self._find_caller is not None else None
        if caller is None:
            with contextlib.suppress(StopIteration):  # it awaits nothing
                self._as_forwarded(scope, _nothing, _nothing).send(None)  # type: ignore[arg-type]  # uvicorn has types of its own
            caller = caller_in(scope)
        return caller.owner("")


async def _nothing(*args: Any) -> None: ...
