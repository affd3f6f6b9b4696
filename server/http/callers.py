"""Callers: the key that a request was sent with, and what that key may do."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import Scope

_SCOPE_KEY = "quire.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """What a server knows of the sender of a request. Callers of the same name are the same caller."""

    name: str = ""  # of the key; empty: the server asks for no keys
    may_prioritise: bool = True  # the `priority` of its requests counts
    requests_per_minute: int | None = None  # None: no limit
    tokens_per_minute: int | None = None  # of prompts and answers together; None: no limit


ANONYMOUS = Caller()


def caller_of(request: HTTPConnection) -> Caller:
    """Who sent `request`; `ANONYMOUS` where no key was asked for."""
    return caller_in(request.scope)


def caller_in(scope: Scope) -> Caller:
    """The same for an ASGI scope."""
    caller: Caller = scope.get(_SCOPE_KEY, ANONYMOUS)
    return caller


def set_caller(scope: Scope, caller: Caller) -> None:
    scope[_SCOPE_KEY] = caller
