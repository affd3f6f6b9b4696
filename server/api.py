"""One API as the application mounts it: what its folder declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from server.docs.endpoint import Endpoint
from server.generation.served_model import ServedModel
from server.http.errors import ErrorBody


@dataclass(frozen=True)
class OwnErrors:
    """The shape of errors of an API whose clients do not read OpenAI's."""

    below: tuple[str, ...]  # paths: their endpoints and those below
    body: ErrorBody
    name: str  # of the schema
    schema: dict[str, Any]


@dataclass(frozen=True)
class API:
    """Endpoints that belong together."""

    add_routes: Callable[[FastAPI, ServedModel], None]
    endpoints: tuple[Endpoint, ...]
    errors: OwnErrors | None = None
