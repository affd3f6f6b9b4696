"""Reads generation_config.json: a model's recommended sampling settings and end-of-text ids."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine.models.errors import ModelError
from engine.models.files import read_json

_SAMPLING_FIELDS = {  # name in the file → name in `SamplingParams`
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_generation_config(folder: Path) -> dict[str, float | int]:
    """Return the sampling defaults in the file, with the names of `SamplingParams`; none if there is no file.

    Raises `ModelError`, which names the field, if a value is not a number.
    """
    config = _read(folder)
    defaults = {ours: config[theirs] for theirs, ours in _SAMPLING_FIELDS.items() if config.get(theirs) is not None}
    for name, value in defaults.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{folder / 'generation_config.json'}: {name!r} must be a number, got {value!r}")
    return defaults


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the end-of-text ids in the file; none if there is no file."""
    config = _read(folder)
    try:
        return token_ids(config, "eos_token_id")
    except ModelError as error:
        raise ModelError(f"{folder / 'generation_config.json'}: {error}") from None


def token_ids(config: dict[str, Any], name: str) -> tuple[int, ...]:
    """Read a field with one token id, a list of them, or null."""
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in ids):
        raise ModelError(f"{name!r} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if os.path.lexists(path) else {}
