"""Quire's public API: `from quire import LLM, SamplingParams`. Names come from `engine` when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import engine
from engine import __all__ as __all__
from engine import __version__ as __version__

if TYPE_CHECKING:
    from engine import *  # noqa: F403


def __getattr__(name: str) -> Any:  # so that `quire --help` and the API process need not import PyTorch
    if name not in __all__:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(engine, name)
