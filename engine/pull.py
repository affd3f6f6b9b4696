"""Downloads a model."""

from __future__ import annotations

from pathlib import Path

from engine.models.families import read_spec
from engine.models.hub import resolve_model


def pull(model: str, *, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Download a model and return its folder. Raises `ModelError` before the download if it is not supported."""
    read_spec(resolve_model(model, revision=revision, download_dir=download_dir, weights=False))
    return resolve_model(model, revision=revision, download_dir=download_dir)
