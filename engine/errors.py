"""Errors that the engine shows to its user: one clear line each. Knows nothing else."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that is not right: names the field, its value and what would be right."""


class EngineError(RuntimeError):
    """The engine cannot start or go on; the message says why and what to change."""


class EngineDeadError(EngineError):
    """The engine process is gone: nothing can be generated any more."""
