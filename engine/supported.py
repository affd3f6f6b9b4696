"""Descriptions of the supported model families and quantization methods, taken from docstrings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.models.families import FAMILIES
from engine.models.quantization import METHODS


def families() -> dict[str, str]:
    """Return architecture name in config.json → description."""
    return _described(FAMILIES)


def quantizations() -> dict[str, str]:
    """Return `quant_method` of quantization_config → description."""
    return _described(METHODS)


def _described(functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    return {name: (function.__doc__ or "").strip().splitlines()[0] for name, function in functions.items()}
