"""The HTTP request that a task works on: what log lines, records and traces say of it."""

from __future__ import annotations

import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

_GOOD_ID = re.compile(r"[!-~]{1,128}")  # anything else could forge a line of the log or split a header


@dataclass(slots=True)
class RequestContext:
    """One HTTP request."""

    scope: Scope
    id: str  # the client's X-Request-Id, or a new one
    received: float  # monotonic seconds
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # of its response, besides others
    span: Any = None  # its `RequestSpan`, where traces are exported
    trace_id: str = ""  # in hex digits


CURRENT: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def new_context(scope: Scope) -> RequestContext:
    given = Headers(scope=scope).get("x-request-id", "")
    request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
    return RequestContext(scope, request_id, time.monotonic())
