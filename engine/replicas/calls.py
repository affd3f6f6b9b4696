"""Calls of an engine process's methods that wait for their replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from engine.errors import EngineDeadError, EngineError
from engine.replicas.messages import Call, Reply


class Calls:
    """The calls to one engine process. Bound to an event loop."""

    def __init__(self, send: Callable[[Call], bool]) -> None:
        """`send`: sends a call; returns False if no process takes commands."""
        self._send = send
        self._ids = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the engine and return its result.

        Raises `EngineError` with the message if the method fails, and `EngineDeadError` if there is no process or it is
        lost before it replies.
        """
        call = Call(next(self._ids), method, arguments)
        reply = self._waiting[call.id] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(call):
                raise EngineDeadError("no engine process takes commands")
            return await reply
        finally:
            del self._waiting[call.id]

    def reply(self, reply: Reply) -> None:
        """Pass a reply on. It is ignored if nothing waits for it any more."""
        waiting = self._waiting.get(reply.id)
        if waiting is None or waiting.done():
            return
        if reply.error:
            waiting.set_exception(EngineError(reply.error))
        else:
            waiting.set_result(reply.result)

    def fail(self, reason: str) -> None:
        """End all calls with `EngineDeadError`: their process is lost."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))
