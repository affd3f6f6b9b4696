"""Log lines of Quire's processes: set up once by each program, never on import. `QUIRE_LOG_LEVEL` says how much."""

from __future__ import annotations

import logging
import os

from engine.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error", "critical")


def configure_logging() -> None:
    """Write the log to stderr. `ConfigError` when `QUIRE_LOG_LEVEL` names no level."""
    level = os.environ.get("QUIRE_LOG_LEVEL", "info").lower()
    if level not in LEVELS:
        raise ConfigError(f"QUIRE_LOG_LEVEL must be one of {', '.join(LEVELS)}, got {level!r}")
    logging.basicConfig(format="%(levelname)s %(asctime)s %(message)s", datefmt="%m-%d %H:%M:%S", level=logging.WARNING)
    for package in ("engine", "server", "benchmarks"):
        logging.getLogger(package).setLevel(level.upper())


def debugging() -> bool:
    """Whether errors should show their tracebacks."""
    return os.environ.get("QUIRE_LOG_LEVEL", "").lower() == "debug"
