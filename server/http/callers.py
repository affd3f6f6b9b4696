"""Callers: the key that a request was sent with, and what that key may do."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import Scope

MAX_USER_LENGTH = 256
_SCOPE_KEY = "quire.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as far as the server knows it. Callers with the same name are the same caller."""

    name: str = ""  # of the key; empty: the server requires no keys
    may_prioritise: bool = True  # whether its requests may set a `priority` below 0
    requests_per_minute: int | None = None  # None: no limit
    tokens_per_minute: int | None = None  # of prompts and answers together; None: no limit
    address: str = ""  # of the client, if the server requires no keys

    def owner(self, user: str) -> str:
        """Return the owner for fair scheduling: the key; without keys, the request's `user`, else the address."""
        if self.name:
            return f"key {self.name}"
        return f"user {user[:MAX_USER_LENGTH]}" if user else f"address {self.address}"


def caller_of(request: HTTPConnection) -> Caller:
    """Return the caller who sent a request."""
    return caller_in(request.scope)


def caller_in(scope: Scope) -> Caller:
    """Return the caller of an ASGI scope."""
    caller: Caller | None = scope.get(_SCOPE_KEY)
    if caller is None:
        client = scope.get("client")
        caller = Caller(address=client[0] if client is not None else "")
    return caller


def set_caller(scope: Scope, caller: Caller) -> None:
    scope[_SCOPE_KEY] = caller
