"""The HTTP request that a task handles, for log lines, records and traces."""

from __future__ import annotations

import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

_GOOD_ID = re.compile(r"[!-~]{1,128}")  # anything else could forge log lines or split headers


@dataclass(slots=True)
class RequestContext:
    """The context of an HTTP request."""

    scope: Scope
    id: str  # the client's X-Request-Id, or a new one
    received: float  # monotonic seconds
    arrived: float = 0.0  # when its body was complete, in monotonic seconds; 0: not yet
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # additional response headers
    span: Any = None  # its `RequestSpan`, if traces are exported
    trace_id: str = ""  # hexadecimal
    key: str = ""  # name of the caller's API key, once the key is checked


ARRIVED = "quire.arrived"  # key in the ASGI scope: when the body was complete, if it was received before the app

CURRENT: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def new_context(scope: Scope) -> RequestContext:
    given = Headers(scope=scope).get("x-request-id", "")
    request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
    return RequestContext(scope, request_id, time.monotonic(), scope.get(ARRIVED, 0.0))
