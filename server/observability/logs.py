"""Adds the HTTP request's id and key name to log records."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from server.observability.context import CURRENT

MAX_POLLED = 256  # paths that are remembered; the polls of further ones are all logged


class RequestFields(logging.Filter):
    """Adds the request's id and key name to each record, and removes query strings from uvicorn's access lines.

    Of the polls of a path that are answered with 503, as while the server starts, only the first is logged.
    """

    def __init__(self, quiet_paths: Collection[str] = ()) -> None:
        """`quiet_paths`: paths whose access lines are dropped; "/static/" covers everything below it, "/" just the
        page.
        """
        super().__init__()
        self._quiet_paths = frozenset(quiet_paths)
        self._polled: set[str] = set()  # paths whose last GET was answered with 503
        self._quiet_folders = tuple(path for path in quiet_paths if path.endswith("/") and path != "/")

    def filter(self, record: logging.LogRecord) -> bool:
        fields: dict[str, Any] = {}
        if (context := CURRENT.get()) is not None:
            fields["request_id"] = context.id
            if context.trace_id:
                fields["trace_id"] = context.trace_id
            if context.key:
                fields["key"] = context.key
        record.fields = fields
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, path, version, status = record.args
            path = str(path).partition("?")[0]  # a query may hold secrets
            record.args = (client, method, path, version, status)
            record.details = {"client": client, "method": method, "path": path, "status": status}
            if path in self._quiet_paths or path.startswith(self._quiet_folders):
                return False
            return method not in ("GET", "HEAD") or self._is_news(path, status)
        return True

    def _is_news(self, path: str, status: object) -> bool:
        """Return False for a 503 that follows another one of the path."""
        if status != 503:
            self._polled.discard(path)
            return True
        if path in self._polled:
            return False
        if len(self._polled) < MAX_POLLED:
            self._polled.add(path)
        return True
