"""Answers of an API process to the main process, about its requests."""

from __future__ import annotations

from typing import Any

from server.generation.caller import Caller
from server.generation.errors import NotFoundError
from server.generation.server_state import ServerState
from server.processes.merged_metrics import Series, sums_of


class LocalRequests:
    """The requests of this process. The methods are those of `Peers`, for one process."""

    def __init__(self, server: ServerState) -> None:
        self._server = server

    async def find(self, owner: str | None, request_id: str) -> dict[str, Any] | None:
        record = self._server.requests.find(owner, request_id)
        return None if record is None else record.as_dict()

    async def newest(self, owner: str | None, most: int) -> list[dict[str, Any]]:
        return [record.as_dict() for record in self._server.requests.newest(owner, most)]

    async def abort(self, caller: str, request_id: str) -> bool:
        try:
            await self._server.abort(request_id, Caller(caller))
        except NotFoundError:
            return False
        return True

    async def num_running(self) -> int:
        return len(self._server.running)

    async def metrics(self) -> list[tuple[Series, float]]:
        """Return what it adds to the server's metrics, the usage of all keys included."""
        own = [*self._server.exposed.collect(), *self._server.requests.usage(None).collect()]
        return list(sums_of(own).items())
