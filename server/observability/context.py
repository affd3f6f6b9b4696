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
    record: Any = None  # the latest `RequestRecord`


ARRIVED = "quire.arrived"  # key in the ASGI scope: when the body was complete, if it was received before the app

CURRENT: ContextVar[RequestContext | None] = ContextVar("request", default=None)

# A request with this header learns how much of its prompt was in the prefix cache, see `prefix_note`.
DEBUG_HEADER, DEBUG_PREFIX, PREFIX_HEADER = "x-quire-debug", "prefix", "x-quire-prefix"


def prefix_note() -> str:
    """Return `RequestRecord.prefix_note` of the current HTTP request if it asks for it; else nothing."""
    context = CURRENT.get()
    if context is None or context.record is None or Headers(scope=context.scope).get(DEBUG_HEADER) != DEBUG_PREFIX:
        return ""
    return str(context.record.prefix_note())


def new_context(scope: Scope) -> RequestContext:
    given = Headers(scope=scope).get("x-request-id", "")
    request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
    return RequestContext(scope, request_id, time.monotonic(), scope.get(ARRIVED, 0.0))
