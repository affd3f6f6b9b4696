"""The model catalogue: supported families and quantization methods, and the download of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.models.families import FAMILIES, read_spec
from engine.models.families.encoders import ENCODERS
from engine.models.gguf.architectures import ARCHITECTURES
from engine.models.hub import OF_HUB, resolve_model
from engine.models.quantization import METHODS


def families() -> dict[str, str]:
    """Return architecture name in config.json → description. Encoders' classifiers stand under their models' names."""
    hidden = {name for name in ENCODERS if not name.endswith("Model")}  # they are the same with a head
    return _described({name: family for name, family in FAMILIES.items() if name not in hidden})


def quantizations() -> dict[str, str]:
    """Return `quant_method` of quantization_config → description."""
    return _described(METHODS)


def gguf_architectures() -> list[str]:
    """Return the names of architectures in GGUF files."""
    return list(ARCHITECTURES)


def pull(model: str, *, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Download a model and return its folder. Raises `ModelError` before the download if it is not supported."""
    read_spec(resolve_model(model, revision=revision, download_dir=download_dir, weights=False))
    return resolve_model(model, revision=revision, download_dir=download_dir)


def check_local(model: str, overrides: Mapping[str, Any] | None = None) -> None:
    """Raise `ModelError` if `model` is a path and no supported model is there. Reads only small files.

    Needs no torch, so that commands can tell a wrong path at once. A Hub id passes: it is looked up when it is loaded.
    """
    is_path = model.startswith(("/", ".", "~")) or (model.count("/") > 1 and OF_HUB.fullmatch(model) is None)
    if is_path or Path(model).expanduser().exists():
        read_spec(resolve_model(model, weights=False), overrides)


def _described(functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    return {name: (function.__doc__ or "").strip().splitlines()[0] for name, function in functions.items()}
