"""Requests begin by turns between their owners, before anything is done for them; probes at once."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Scope
from uvicorn.server import ServerState

from server.generation.caller import Caller
from server.http.connections import Connection, ConnectionLimits, Connections
from server.http.entrance import Entrance

CALLERS = {b"a": Caller("a"), b"b": Caller("b")}
LIMITS = ConnectionLimits(max_connections=1000, max_header_bytes=1000, header_timeout=60, send_timeout=60)


class Transport(asyncio.Transport):
    """Remembers what is written."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        super().__init__({"socket": connection})
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None: ...
    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None: ...


class Served:
    """Connections of an app that begins an answer or gives none; to be used in an event loop."""

    def __init__(self, entrance: Entrance) -> None:
        self.begun: list[Scope] = []
        self._connections = Connections(LIMITS, entrance)
        self._config = uvicorn.Config(
            self._app, interface="asgi3", lifespan="off", proxy_headers=False, log_config=None
        )
        self._config.load()

    async def _app(self, scope: Scope, receive: Any, send: Any) -> None:
        self.begun.append(scope)
        if scope["path"] == "/whole":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"1", "more_body": True})
            await send({"type": "http.response.body", "body": b"2", "more_body": True})
        elif scope["path"] == "/head":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    def ask(self, key: str, path: str = "/v1/completions", transport: Transport | None = None) -> Connection:
        connection = self._connections.protocol(
            config=self._config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop()
        )
        connection.connection_made(transport or Transport())
        connection.data_received(
            b"POST %b HTTP/1.1\r\nAuthorization: Bearer %b\r\n\r\n" % (path.encode(), key.encode())
        )
        return connection

    def begun_paths(self) -> list[str]:
        return [scope["path"] for scope in self.begun]


async def _turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_of_a_burst_few_begin_before_another_callers_and_probes_at_once() -> None:
    async def run() -> None:
        served = Served(Entrance(CALLERS.get))
        for _ in range(100):
            served.ask("a")
        served.ask("b", "/b")
        served.ask("", "/health")
        await _turns(4)
        assert {"/b", "/health"} <= set(served.begun_paths())
        assert len(served.begun) <= 8
        await _turns(110)
        assert len(served.begun) == 102

    asyncio.run(run())


def test_requests_whose_clients_have_gone_never_begin() -> None:
    async def run() -> None:
        served = Served(Entrance(CALLERS.get))
        for connection in [served.ask("a") for _ in range(100)]:
            connection.connection_lost(None)
        served.ask("a", "/last")
        await _turns(4)
        assert served.begun_paths()[-1] == "/last"
        assert len(served.begun) <= 2  # the first one began at once

    asyncio.run(run())


def test_clients_that_hung_up_are_seen_before_their_requests_begin() -> None:
    async def run() -> None:
        served = Served(Entrance(CALLERS.get))
        served.ask("a", "/first")  # begins at once
        here, there = socket.socketpair()
        with here:
            served.ask("a", "/gone", Transport(here))
            there.close()
            served.ask("a", "/last")
            await _turns(8)
        assert served.begun_paths() == ["/first", "/last"]

    asyncio.run(run())


def test_the_head_of_a_response_is_sent_with_what_follows_it() -> None:
    async def run() -> None:
        served, whole, head = Served(Entrance()), Transport(), Transport()
        served.ask("", "/whole", whole)
        served.ask("", "/head", head)
        await _turns(8)
        assert len(whole.written) == 2
        assert whole.written[0].startswith(b"HTTP/1.1 200 OK")
        assert whole.written[0].endswith(b"1\r\n1\r\n")
        assert len(head.written) == 1, "nothing follows, and it is sent"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("key", "headers", "owner"),
    [
        ("a", {}, "key a"),
        ("unknown", {}, "address 127.0.0.1"),
        ("unknown", {"x-forwarded-for": "192.0.2.7"}, "address 192.0.2.7"),
    ],
)
def test_owners(key: str, headers: dict[str, str], owner: str) -> None:
    given = {"authorization": f"Bearer {key}", **headers}
    scope = cast(
        Scope,
        {
            "type": "http",
            "method": "POST",
            "path": "/v1/models",
            "client": ("127.0.0.1", 1),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        },
    )
    assert Entrance(CALLERS.get).tenant(scope) == owner
