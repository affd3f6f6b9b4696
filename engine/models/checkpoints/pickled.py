"""Checkpoints in PyTorch's own format, which some older encoders are published in: read without running code."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from engine.models.checkpoints.memory import NamedTensors
from engine.models.errors import ModelError
from engine.models.files import PICKLED
from engine.utils.folder_files import open_file


def read_pickled(folder: Path) -> NamedTensors:
    """Map the tensors of pytorch_model.bin. Raises `ModelError` if it holds anything but tensors by name."""
    path = folder / PICKLED
    try:
        open_file(path, folder).close()  # it lies in the folder or its cache
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{path}: cannot be read ({reason}); convert it with transformers' save_pretrained") from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelError(f"{path}: must hold tensors by name, and nothing else")
    return NamedTensors({str(name): tensor for name, tensor in found.items()}, str(folder))
