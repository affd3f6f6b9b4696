"""Log lines of Quire's processes: set up once by each program, never on import.

`QUIRE_LOG_LEVEL` says how much, `QUIRE_LOG_FORMAT` in what form. Filters may give a
record two dicts: `fields`, which a line of text has at its end, and `details`, which its message has already. JSON objects
have both as members.
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
    """Write the log to stderr, through `filters`, unless another program's handlers are there already.

    `ConfigError` when a variable names no level or no format.
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
    """Whether errors should show their tracebacks."""
    return os.environ.get("QUIRE_LOG_LEVEL", "").lower() == "debug"


def traceback_without_text(error: BaseException) -> str:
    """Where an error came from and of what type it is. Its message may hold what a client sent, which no log shows."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()


def _variable(name: str, default: str, choices: tuple[str, ...]) -> str:
    value = os.environ.get(name, default).lower()
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


class _Stderr(logging.StreamHandler[TextIO]):
    """The handler of `configure_logging`."""


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in getattr(record, "fields", {}).items())
        return super().formatMessage(record) + fields


class _JSON(logging.Formatter):
    """One object a line."""

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
