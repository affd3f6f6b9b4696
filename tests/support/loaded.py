"""Loads the decoder of a model's folder, or of another checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.models.checkpoints import Checkpoint, open_checkpoint
from engine.models.decoder import Decoder
from engine.models.formats import weight_formats
from engine.models.matrix import Scope
from engine.models.spec import ModelSpec
from engine.models.weights import load_model

SCOPE = ("shard", "stage", "communicator")  # fields of `Scope`
FORMAT = ("load_format", "seed")  # parameters of `open_checkpoint`


def load(
    source: Path | Checkpoint,
    spec: ModelSpec,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    compress_experts: bool = False,
    **options: Any,
) -> Decoder:
    """options: fields of `Scope`, and parameters of `open_checkpoint` and `load_model`."""
    where = {name: options.pop(name) for name in SCOPE if name in options}
    formats = weight_formats(spec.quantization, compress_experts=compress_experts)
    scope = Scope(dtype, torch.device(device), formats, **where)
    stored = {name: options.pop(name) for name in FORMAT if name in options}
    checkpoint = (
        source if isinstance(source, Checkpoint) else open_checkpoint(source, **stored, quantization=spec.quantization)
    )
    return load_model(checkpoint, spec, scope, **options)
