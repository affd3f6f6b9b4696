"""Ollama's durations: how long a model stays loaded after a request."""

from __future__ import annotations

import re

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
MAX_SECONDS = 1e9


def seconds_of(value: object) -> float | None:
    """Return the seconds of a number, or of a text such as "5m", "1h30m" or "-1"; None: it is no duration.

    Negative: for ever.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _bounded(float(value))
    if not isinstance(value, str):
        return None
    text = value.strip()
    if _NUMBER.fullmatch(text):
        return _bounded(float(text))
    sign, text = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return _bounded(sign * sum(float(number) * _UNITS[unit] for number, unit in parts))


def _bounded(seconds: float) -> float | None:
    return None if seconds != seconds else max(min(seconds, MAX_SECONDS), -1.0 if seconds < 0 else 0.0)
