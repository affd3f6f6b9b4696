"""Weight formats: how matrices are stored in a checkpoint, repacked in memory and multiplied. One module for each.

`floats` is what checkpoints without a quantization_config have. Every other module has `read(quantization_config)`, which
makes its `WeightFormat`, and is imported when a model is loaded: `FORMATS` is read by processes without PyTorch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.models.layers import WeightFormat

FORMATS: dict[str, str] = {}  # quantization_config's quant_method → the module


def read_format(quantization: Mapping[str, Any]) -> WeightFormat:
    """The format that config.json's quantization_config asks for, by one of the methods in `FORMATS`."""
    return importlib.import_module(f"engine.models.formats.{FORMATS[quantization['quant_method']]}").read(quantization)
