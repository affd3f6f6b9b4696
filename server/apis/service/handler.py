"""Endpoints about the server itself: load, version, metrics, request records, abort, prefix cache, sleep."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric

import engine as quire
from server.generation.checks import check_admin
from server.generation.server_state import ServerState
from server.http.callers import caller_of
from server.http.probes import add_probes

MAX_LISTED = 20  # requests


def add_routes(app: FastAPI, server: ServerState) -> None:
    add_probes(app, server.readiness)

    @app.get("/load")
    @app.get("/v1/load")
    async def load() -> dict[str, Any]:
        return await server.load()

    @app.post("/v1/requests/{request_id}/abort")
    async def abort_request(request_id: str, request: Request) -> dict[str, Any]:
        await server.abort(request_id, caller_of(request))
        return {"id": request_id, "aborted": True}

    @app.get("/requests/{request_id}")
    async def request_record(request_id: str, request: Request, key: str | None = None) -> dict[str, Any]:
        return await server.record(_owner(request, key), request_id)

    @app.get("/requests")
    async def request_records(request: Request, key: str | None = None) -> dict[str, Any]:
        return {"object": "list", "data": await server.newest_records(_owner(request, key), MAX_LISTED)}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": quire.__version__}

    @app.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        caller = caller_of(request)
        owner = None if caller.is_admin else caller.name
        own = [*server.exposed.collect(), *server.requests.usage(owner).collect()]
        text = generate_latest(_Collected(await server.peers.merged(own, owner)))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    _add_memory_routes(app, server)


class _Collected:
    """Metrics in the form of a registry."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _add_memory_routes(app: FastAPI, server: ServerState) -> None:
    """Add the routes of what is in the device's memory: prefix cache, sleep, weights."""

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> dict[str, Any]:
        await server.reset_prefix_cache(caller_of(request))
        return {"reset": True}

    @app.post("/sleep", response_model=None)
    async def sleep(request: Request, level: int = 1, mode: Literal["abort", "wait"] = "abort") -> Response:
        await server.sleep(level, caller_of(request), abort=mode == "abort")
        return Response()

    @app.post("/wake_up", response_model=None)
    async def wake_up(request: Request) -> Response:
        await server.wake_up(caller_of(request))
        return Response()

    @app.post("/v1/weights")
    async def update_weights(
        request: Request, path: str, mode: Literal["abort", "wait"] = "wait"
    ) -> dict[str, str | int]:
        await server.update_weights(path, caller_of(request), abort=mode == "abort")
        return {"path": server.engine.weights_path, "version": server.engine.weights_version}

    @app.get("/v1/weights")
    async def weights(request: Request) -> dict[str, str | int]:
        check_admin(caller_of(request), "the folder of the weights")
        return {"path": server.engine.weights_path, "version": server.engine.weights_version}

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": server.engine.is_sleeping}


def _owner(request: Request, key: str | None) -> str | None:
    """Return whose requests are asked for; None: everyone's, for an admin who names no `key`."""
    caller = caller_of(request)
    if key is None:
        return None if caller.is_admin else caller.name
    if key != caller.name:
        check_admin(caller, "reading the requests of another key")
    return key
