"""The callers of HTTP requests: the middleware finds them, the handlers use them."""

from __future__ import annotations

from starlette.requests import HTTPConnection
from starlette.types import Scope

from server.generation.caller import Caller
from server.observability.context import CURRENT

_SCOPE_KEY = "quire.caller"


def caller_of(request: HTTPConnection) -> Caller:
    """Return the caller who sent a request."""
    return caller_in(request.scope)


def caller_in(scope: Scope) -> Caller:
    """Return the caller of an ASGI scope."""
    caller: Caller | None = scope.get(_SCOPE_KEY)
    if caller is None:
        client = scope.get("client")
        # A server that requires keys sets the caller of each request; without keys, everyone may do everything.
        caller = Caller(address=client[0] if client is not None else "", is_admin=True)
    return caller


def set_caller(scope: Scope, caller: Caller) -> None:
    scope[_SCOPE_KEY] = caller
    if (context := CURRENT.get()) is not None:
        context.key = caller.name
