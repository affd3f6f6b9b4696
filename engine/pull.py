"""Downloads a model that can be served."""

from __future__ import annotations

from pathlib import Path

from engine.models.families import read_spec
from engine.models.hub import resolve_model


def pull(model: str, *, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The model's folder, whole. One that cannot be served is refused, by `ModelError`, before its weights are downloaded."""
    read_spec(resolve_model(model, revision=revision, download_dir=download_dir, weights=False))
    return resolve_model(model, revision=revision, download_dir=download_dir)
