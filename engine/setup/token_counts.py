"""Counts the tokens of texts, and saves the most frequent ones for a draft head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from engine.config import EngineConfig
from engine.models.drafters.token_map import most_frequent, write_token_map
from engine.models.families import read_spec
from engine.models.hub import resolve_model
from engine.processing.input_processor import load_tokenizer


def save_most_frequent(
    model: str, texts: Iterable[str], size: int, output: Path, download_dir: str | None = None
) -> tuple[list[int], Counter[int]]:
    """Write the `size` most frequent tokens, ends of text among them. Returns their ids, and the counts of all.

    Raises `ModelError` and `TokenizerError`.
    """
    folder = resolve_model(model, download_dir=download_dir, weights=False)
    tokenizer, counts = load_tokenizer(EngineConfig(model=model, download_dir=download_dir), folder), Counter[int]()
    for text in texts:
        counts.update(tokenizer.encode(text, add_special_tokens=False))
    kept = most_frequent(counts, size, read_spec(folder).eos_token_ids)
    write_token_map(output, kept)
    return kept, counts
