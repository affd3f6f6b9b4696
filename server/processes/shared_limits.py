"""Limits that hold for all API processes together: the main process counts, the others ask it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from server.generation.caller import Caller
from server.generation.errors import BusyError, InvalidRequestError, RateLimitError
from server.generation.queue import RequestQueue
from server.generation.rate_limits import RateLimits, Remaining

CallMain = Callable[..., Awaitable[Any]]


class SharedQueue:
    """The queue of the main process, as an API process asks it. See `RequestQueue`."""

    def __init__(self, call: CallMain, send: Callable[..., None]) -> None:
        """`call`: calls a method of the main process. `send`: calls one without waiting for its result."""
        self._call, self._send = call, send
        self._ids = itertools.count()

    @contextlib.asynccontextmanager
    async def admitted(self, num_new: int, tenant: str) -> AsyncIterator[None]:
        """See `RequestQueue.admitted`."""
        number = next(self._ids)
        try:
            refusal = await self._call("enter", number=number, num_new=num_new, tenant=tenant)
            if refusal is not None:
                reason, retry_after = refusal
                raise InvalidRequestError(reason) if retry_after is None else BusyError(reason, retry_after)
            yield
        finally:
            self._send("leave", number=number)


class SharedRateLimits:
    """The rate limits of the main process, as an API process asks for them. See `RateLimits`."""

    def __init__(self, call: CallMain, send: Callable[..., None]) -> None:
        self._call, self._send = call, send

    async def begin(self, caller: Caller) -> None:
        refusal = await self._call("begin", caller=caller)
        if refusal is not None:
            raise RateLimitError(*refusal)

    def use_tokens(self, caller: Caller, num_tokens: int) -> None:
        self._send("use_tokens", caller=caller, num_tokens=num_tokens)

    async def remaining(self, caller: Caller) -> list[Remaining]:
        return msgspec.convert(await self._call("remaining", caller=caller), list[Remaining])


class LimitsHost:
    """The main process's side for one API process: the methods that it calls."""

    def __init__(self, queue: RequestQueue, rate_limits: RateLimits) -> None:
        self._queue, self._rate_limits = queue, rate_limits
        self._entered: dict[int, contextlib.ExitStack] = {}

    async def enter(self, number: int, num_new: int, tenant: str) -> tuple[str, int | None] | None:
        """Admit requests. Returns the reason and the seconds to wait if they are refused; None: to no use."""
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(self._queue.entering(num_new, tenant))
        except BusyError as error:
            return str(error), error.retry_after
        except InvalidRequestError as error:
            return str(error), None
        self._entered[number] = stack
        return None

    async def leave(self, number: int) -> None:
        """Forget requests: they have been sent to the engine, or have ended."""
        if (stack := self._entered.pop(number, None)) is not None:
            stack.close()

    async def begin(self, caller: Any) -> tuple[str, int] | None:
        """Count a request. Returns the reason and the seconds to wait if the caller has none left."""
        try:
            await self._rate_limits.begin(msgspec.convert(caller, Caller))
        except RateLimitError as error:
            return str(error), error.retry_after
        return None

    async def use_tokens(self, caller: Any, num_tokens: int) -> None:
        self._rate_limits.use_tokens(msgspec.convert(caller, Caller), num_tokens)

    async def remaining(self, caller: Any) -> list[Remaining]:
        return await self._rate_limits.remaining(msgspec.convert(caller, Caller))

    def close(self) -> None:
        """The API process is lost."""
        for stack in self._entered.values():
            stack.close()
        self._entered.clear()
