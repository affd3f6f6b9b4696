"""Random weights of any shape whose greedy text counts: after token t comes t + 1.

So it is known what such a model writes, though its steps multiply matrices of full size, and the prompt decides how
much of it a lookup finds (`workloads.editing`): acceptance is measured, not imposed. Embeddings are so large that what
the layers add to them changes no greedy token, and row t + 1 of the output head is the embedding of t.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.model_shapes import SHAPES, model_folder
from engine.errors import ConfigError
from engine.models import weights
from engine.models.decoder import Decoder
from engine.models.weights import EMBEDDING, LM_HEAD, fill_randomly

EMBEDDING_STD, HEAD_STD = 32.0, 0.02  # all layers of 8B together add some 15


def counting_folder(name: str, root: Path) -> Path:
    """The folder of a known shape, in `root/counting`, whose output head is not tied to its embedding. `ConfigError`
    for models that have weights of their own.
    """
    if name not in SHAPES:
        raise ConfigError(f"model {name!r} has weights of its own, so its text does not count: give a known shape")
    folder = model_folder(name, root / "counting")
    tied = {key: False for key in ("tie_word_embeddings", "tie_embedding") if key in SHAPES[name]}
    (folder / "config.json").write_text(json.dumps(SHAPES[name] | tied, indent=1) + "\n", encoding="utf-8")
    return folder


def counting_tensors(shape: list[int], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """The embedding [vocab, hidden] and the output head of a checkpoint, by name."""
    embedding = torch.empty(shape).normal_(0, EMBEDDING_STD, generator=torch.Generator().manual_seed(seed))
    return {EMBEDDING: embedding.to(dtype), LM_HEAD: _head(embedding).to(dtype)}


@contextmanager
def counting_dummies() -> Iterator[None]:
    """Within, the dummy weights of engines in this process count."""
    with mock.patch.object(weights, "fill_randomly", _fill):
        yield


def _fill(model: nn.Module, device: torch.device, seed: int) -> None:
    fill_randomly(model, device, seed)
    assert isinstance(model, Decoder)
    assert not model.spec.tie_word_embeddings
    embedding, head = model.embed_tokens.weight, model.lm_head.weight
    assert isinstance(head, Tensor)
    embedding.normal_(0, EMBEDDING_STD, generator=torch.Generator(device).manual_seed(seed))
    head.copy_(_head(embedding))


def _head(embedding: Tensor) -> Tensor:
    return embedding.roll(1, 0) * (HEAD_STD / EMBEDDING_STD)
