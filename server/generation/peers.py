"""Questions to other API processes of the same server about their requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from prometheus_client.core import Metric


class Peers(Protocol):
    """Other API processes, which answer requests beside this one."""

    async def find(self, owner: str | None, request_id: str) -> dict[str, Any] | None:
        """Return a request as `RequestRecord.as_dict`. `owner`: None: of any owner."""

    async def newest(self, owner: str | None, most: int) -> Sequence[dict[str, Any]]:
        """Return the newest requests, at most `most` of each process."""

    async def abort_request(self, caller: str, request_id: str) -> bool:
        """Abort a request of the caller of that name. Returns whether one runs."""

    async def num_running(self) -> int:
        """Return the number of requests that they answer."""

    async def merged(self, own: Iterable[Metric], owner: str | None) -> list[Metric]:
        """Return this process's metrics and theirs together. `owner`: whose usage to count; None: of all keys."""


class NoPeers:
    """There is one API process."""

    async def find(self, owner: str | None, request_id: str) -> dict[str, Any] | None:
        return None

    async def newest(self, owner: str | None, most: int) -> Sequence[dict[str, Any]]:
        return ()

    async def abort_request(self, caller: str, request_id: str) -> bool:
        return False

    async def num_running(self) -> int:
        return 0

    async def merged(self, own: Iterable[Metric], owner: str | None) -> list[Metric]:
        return list(own)
