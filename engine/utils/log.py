"""Logging of Quire's processes. Each program configures it once; imports never do.

`QUIRE_LOG_LEVEL` sets the level, `QUIRE_LOG_FORMAT` the format. Filters may add two dicts to a record: `fields`, which
are appended to a line of text, and `details`, which the message contains already. JSON objects include both as members.
"""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from typing import TextIO

from engine.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")


def configure_logging(*filters: logging.Filter) -> None:
    """Write the log to stderr, through `filters`, unless the root logger has handlers of another program.

    Raises `ConfigError` if a variable has an invalid level or format.
    """
    level = _variable("QUIRE_LOG_LEVEL", "info", LEVELS)
    handler = _Stderr()
    handler.setFormatter(_JSON() if _variable("QUIRE_LOG_FORMAT", "text", FORMATS) == "json" else _Text())
    for each in filters:
        handler.addFilter(each)
    root = logging.getLogger()
    for former in [each for each in root.handlers if isinstance(each, _Stderr)]:
        root.removeHandler(former)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    for package in ("engine", "server", "benchmarks"):
        logging.getLogger(package).setLevel(level.upper())


def debugging() -> bool:
    """Return whether errors should show their tracebacks."""
    return os.environ.get("QUIRE_LOG_LEVEL", "").lower() == "debug"


def traceback_without_text(error: BaseException) -> str:
    """Return type and traceback of an error without its message, which may quote a client's request."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()


def _variable(name: str, default: str, choices: tuple[str, ...]) -> str:
    value = os.environ.get(name, default).lower()
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


class _Stderr(logging.StreamHandler[TextIO]):
    """The handler installed by `configure_logging`."""


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in getattr(record, "fields", {}).items())
        return super().formatMessage(record) + fields


class _JSON(logging.Formatter):
    """Formats each record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            **getattr(record, "fields", {}),
            **getattr(record, "details", {}),
        }
        if record.exc_text:
            line["exception"] = record.exc_text
        elif record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
