"""Adds the HTTP request's id and key name to log records."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from server.observability.context import CURRENT


class RequestFields(logging.Filter):
    """Adds the request's id and key name to each record, and removes query strings from uvicorn's access lines."""

    def __init__(self, quiet_paths: Collection[str] = ()) -> None:
        """`quiet_paths`: paths whose access lines are dropped; "/static/" covers everything below it, "/" just the
        page.
        """
        super().__init__()
        self._quiet_paths = frozenset(quiet_paths)
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
            return path not in self._quiet_paths and not path.startswith(self._quiet_folders)
        return True
