"""Reads the pooling configuration that sentence-transformers adds to embedding models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine.models.errors import ModelError
from engine.models.files import load_json, read_json

MODULES = "modules.json"  # present in every embedding model
SUPPORTED = ("Transformer", "Pooling", "Normalize")


def is_embedding_model(folder: Path) -> bool:
    """Return True if the model in `folder` is an embedding model. Raises `ModelError` if it needs more than pooling."""
    path = folder / MODULES
    if not os.path.lexists(path):
        return False
    try:
        types = [module["type"].rpartition(".")[2] for module in load_json(path)]
    except (LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: is no list of modules, each with its type ({error}); download it again") from error
    if unknown := [name for name in types if name not in SUPPORTED]:
        raise ModelError(f"{path}: module {unknown[0]!r} is not supported; supported: {', '.join(SUPPORTED)}")
    return True


def read_pooling(folder: Path) -> str:
    """Return "last" or "mean" from 1_Pooling/config.json; "last", as usual for decoders, if there is no such file.

    Raises `ModelError` for another pooling method.
    """
    path = folder / "1_Pooling" / "config.json"
    config = read_json(path, folder) if os.path.lexists(path) else {}
    prefix = "pooling_mode_"
    modes: list[Any] = [
        name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True
    ]
    match modes or [config.get("pooling_mode")]:
        case ["lasttoken"] | [None]:
            return "last"
        case ["mean_tokens" | "mean"]:
            return "mean"
        case other:
            raise ModelError(f"{path}: pools by {', '.join(map(str, other))}; choose last or mean by --pooling")
