"""Reads one field of config.json. `default` also replaces null; without a default the field is required."""

from __future__ import annotations

import math
from typing import Any

from engine.models.errors import ModelError

Config = dict[str, Any]
MAX_INTEGER = 2**31 - 1


def integer(
    config: Config, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER
) -> int:
    value = _field(config, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ModelError(f"{name!r} must be an integer of at least {minimum}, got {value!r}")
    if value > maximum:
        raise ModelError(f"{name!r} must be at most {maximum}, got {value!r}")
    return value


def number(config: Config, name: str, default: float | None = None) -> float:
    value = _field(config, name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"{name!r} must be a positive number, got {value!r}")
    return float(value)


def flag(config: Config, name: str, default: bool = False) -> bool:
    value = _field(config, name, default)
    if not isinstance(value, bool):
        raise ModelError(f"{name!r} must be true or false, got {value!r}")
    return value


def _field(config: Config, name: str, default: Any) -> Any:
    value = config.get(name)
    if value is None and default is None:
        raise ModelError(f"{name!r} is missing")
    return default if value is None else value
