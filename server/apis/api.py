"""The declaration of an API, which the application mounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from server.apis.endpoint import Endpoint
from server.generation.server_state import ServerState
from server.http.errors import ErrorBody


@dataclass(frozen=True)
class OwnErrors:
    """The error format of an API that does not use OpenAI's."""

    below: tuple[str, ...]  # paths; the format also applies to all paths below them
    body: ErrorBody
    name: str  # of the schema
    schema: dict[str, Any]


@dataclass(frozen=True)
class API:
    """An API: a group of endpoints."""

    add_routes: Callable[[FastAPI, ServerState], None]
    endpoints: tuple[Endpoint, ...]
    errors: OwnErrors | None = None
