"""Hybrid models through the whole engine: small random checkpoints, and the greedy answers of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.oracles.families import VOCAB, make_checkpoint, transformers_tokens

NUM_TOKENS = 48
SHARED = 70  # tokens with which some prompts begin
LENGTHS = (1, 2, 16, 17, 33, 90, 131)


def make_hybrid(case: str, folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Save the checkpoint of a case of `families`. Returns prompts, and the greedy tokens of transformers for each."""
    model = make_checkpoint(case, folder, {"max_position_embeddings": 512})
    draw = random.Random(2)
    shared = _tokens(draw, SHARED)
    prompts = [_tokens(draw, length) for length in LENGTHS]
    prompts += [shared + _tokens(draw, length) for length in (1, 9, 40)]
    prompts += [shared[:40] + _tokens(draw, 30), shared]
    return prompts, transformers_tokens(model, folder, prompts, NUM_TOKENS)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, VOCAB) for _ in range(count)]


def fill_unwritten(runner: Any) -> None:
    """Fill the memory of all states and of all unwritten keys and values with NaN."""
    for cache in runner.forward.kv_cache:
        if not isinstance(cache, Tensor):
            for part in cache:
                part.fill_(torch.nan)
