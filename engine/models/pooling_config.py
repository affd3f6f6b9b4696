"""1_Pooling/config.json: how an embedding model's makers pool. Knows sentence-transformers' fields; never pools."""

from __future__ import annotations

from pathlib import Path

from engine.models.files import read_json


def read_pooling(folder: Path) -> str:
    """ "mean" where the file says so, else "last", as it is for decoders. ModelError when it is broken."""
    path = folder / "1_Pooling" / "config.json"
    config = read_json(path) if path.exists() else {}
    is_mean = config.get("pooling_mode_mean_tokens") is True or config.get("pooling_mode") == "mean"
    return "mean" if is_mean else "last"
