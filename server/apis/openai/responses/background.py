"""Responses generated independently of client connections, with events that clients can replay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from server.apis.openai.responses.store import EVENT_BYTES
from server.http.errors import APIError

MAX_BYTES = 256 << 20  # of the events of all running responses


class BackgroundResponse:
    """One background response. An event's index in `events` is its `sequence_number`."""

    def __init__(self, response: dict[str, Any], events: list[bytes]) -> None:
        """`response`, `events`: filled by the response builder."""
        self.response, self.events = response, events
        self.is_cancelled = False
        self.is_kept = True  # false: its events were dropped to save memory
        self.num_bytes = 0
        self._num_seen = 0
        self._over = False
        self._changed = asyncio.Event()

    def see(self) -> int:
        """Notify followers of new events; return their size in bytes."""
        new = sum(len(event) + EVENT_BYTES for event in self.events[self._num_seen :])
        self._num_seen = len(self.events)
        self.num_bytes += new
        self._notify()
        return new

    def drop_events(self) -> None:
        """Drop the events. Followers get an error."""
        self.is_kept = False
        self.events.clear()
        self._notify()

    def end(self) -> None:
        self._over = True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def over(self) -> None:
        """Wait until the response has ended."""
        while not self._over:
            await self._changed.wait()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after number `after` until the end. Raises `APIError` if events were dropped."""
        at = after + 1
        while True:
            if not self.is_kept:
                raise events_not_kept()
            if new := self.events[at:]:
                at += len(new)
                yield b"".join(new)
            elif self._over:
                return
            else:
                await self._changed.wait()


class Background:
    """All running background responses, by owner and id."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._running: dict[tuple[str, str], BackgroundResponse] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, owner: str, response_id: str) -> BackgroundResponse | None:
        return self._running.get((owner, response_id))

    def start(self, owner: str, running: BackgroundResponse, events: AsyncGenerator[bytes, None]) -> None:
        """Consume `events` in a task. The generator fills the response and stores it before it ends."""
        self._running[owner, running.response["id"]] = running
        task = asyncio.create_task(self._run(owner, running, events))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, owner: str, running: BackgroundResponse, events: AsyncGenerator[bytes, None]) -> None:
        try:
            async with aclosing(events):
                async for _ in events:
                    if not running.is_kept:
                        running.events.clear()
                        continue
                    self._num_bytes += running.see()
                    if self._num_bytes > self._max_bytes:
                        self._drop_most()
        finally:
            self._num_bytes -= running.num_bytes if running.is_kept else 0
            del self._running[owner, running.response["id"]]
            running.end()

    def _drop_most(self) -> None:
        most = max((each for each in self._running.values() if each.is_kept), key=lambda each: each.num_bytes)
        self._num_bytes -= most.num_bytes
        most.drop_events()


async def replayed(events: Sequence[bytes], after: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of a finished response after number `after`."""
    yield b"".join(events[after + 1 :])


def events_not_kept() -> APIError:
    reason = "no events are stored for this response (only for background=true, up to a limit): use stream=false"
    return APIError(400, reason, "stream")
