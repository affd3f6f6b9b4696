"""Turns between callers: before a request is worked on, and for GET none."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope, Send

from server.generation.caller import Caller
from server.http.callers import set_caller
from server.http.middleware import FairMiddleware


async def _receive() -> Message:
    return {"type": "http.disconnect"}


async def _send(message: Message) -> None:
    """Nothing is sent."""


def _scope(name: str, method: str = "POST") -> Scope:
    scope: Scope = {"type": "http", "method": method, "headers": []}
    set_caller(scope, Caller(name))
    return scope


def test_of_a_burst_few_begin_before_another_caller() -> None:
    begun: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope)

    async def run() -> None:
        middleware = FairMiddleware(app)
        requests = [_scope("a") for _ in range(100)] + [_scope("b"), _scope("a", "GET")]
        tasks = [asyncio.create_task(middleware(scope, _receive, _send)) for scope in requests]
        await asyncio.sleep(0)
        assert begun[1:] == [requests[-1]], "what only asks does not wait"
        await asyncio.gather(*tasks)
        assert begun.index(requests[100]) <= 4
        assert len(begun) == 102

    asyncio.run(run())
