"""Files of the tokens that a draft head may propose: the most frequent ones of texts, counted by `quire count`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from engine.models.errors import ModelError

IDS = "token_ids"


def most_frequent(counts: Counter[int], size: int, always: Iterable[int] = ()) -> list[int]:
    """Return at most `size` token ids in ascending order: those of `always`, then the most frequent ones."""
    kept = dict.fromkeys(always)
    for token_id, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0])):
        if len(kept) >= size:
            break
        kept[token_id] = None
    return sorted(kept)


def write_token_map(path: Path, token_ids: list[int]) -> None:
    """Write a file that `read_token_map` reads."""
    path.write_text(json.dumps({IDS: token_ids}) + "\n", encoding="utf-8")


def read_token_map(path: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids of a file in ascending order: JSON, a list or an object with `token_ids`; or `.pt`, a tensor
    or a list that PyTorch has saved, as for SGLang. Raises `ModelError`.
    """
    try:
        found: Any = _read(path)
    except Exception as error:  # of JSON, pickle and others
        raise ModelError(f"{path}: cannot be read as token ids ({type(error).__name__})") from None
    if isinstance(found, dict):
        found = found.get(IDS)
    if not isinstance(found, list) or not found or not all(type(each) is int for each in found):
        raise ModelError(f"{path}: must hold a list of token ids")
    if not 0 <= min(found) <= max(found) < vocab_size:
        raise ModelError(f"{path}: token ids must be from 0 to {vocab_size - 1}")
    return tuple(sorted(set(found)))


def _read(path: Path) -> Any:
    if path.suffix != ".pt":
        return json.loads(path.read_text(encoding="utf-8"))
    found = torch.load(path, map_location="cpu", weights_only=True)
    return found.flatten().tolist() if isinstance(found, torch.Tensor) else found
