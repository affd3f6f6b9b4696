"""Ends the work for clients that have hung up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive


@asynccontextmanager
async def ended_by(watching: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Cancel the block when `watching` completes first, and leave it without an error.

    Uses one task; a task group would need another one for the block.
    """
    block = asyncio.current_task()
    assert block is not None
    cancelled = False
    ended = False

    def end(watcher: asyncio.Task[None]) -> None:
        nonlocal cancelled
        if not watcher.cancelled() and not ended:
            cancelled = block.cancel()

    watcher = asyncio.create_task(watching)
    watcher.add_done_callback(end)
    try:
        yield
    except asyncio.CancelledError:
        if not cancelled or block.uncancel():
            raise
    finally:
        ended = True
        watcher.cancel()


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
