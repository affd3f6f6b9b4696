"""What can be served, for people: model families and formats of weights, as their functions describe themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.models.families import FAMILIES
from engine.models.quantization import METHODS


def families() -> dict[str, str]:
    """Architectures, as config.json calls them → what they are."""
    return _described(FAMILIES)


def quantizations() -> dict[str, str]:
    """Methods, as quantization_config's quant_method calls them → what they are."""
    return _described(METHODS)


def _described(functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    return {name: (function.__doc__ or "").strip().splitlines()[0] for name, function in functions.items()}
