"""Checkpoints: readers of stored tensors, one module for each kind of storage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.models.checkpoints.base import Checkpoint as Checkpoint
from engine.models.checkpoints.base import RandomWeights as RandomWeights
from engine.models.checkpoints.base import StoredTensor as StoredTensor
from engine.models.checkpoints.bitsandbytes import BitsAndBytesFolder as BitsAndBytesFolder
from engine.models.checkpoints.gguf import GGUFCheckpoint as GGUFCheckpoint
from engine.models.checkpoints.memory import NamedTensors as NamedTensors
from engine.models.checkpoints.overlaid import OverlaidCheckpoint
from engine.models.checkpoints.pickled import read_pickled
from engine.models.checkpoints.safetensors import SafetensorsFolder as SafetensorsFolder
from engine.models.errors import ModelError
from engine.models.files import PICKLED, QUANTIZATION, WEIGHT_FILES, read_config
from engine.models.gguf.folder import is_derived
from engine.models.quantization import NamedQuantization, Quantization


def open_checkpoint(
    folder: Path,
    load_format: str = "auto",
    seed: int = 0,
    quantization: Quantization | None = None,
    overlays: Sequence[Path] = (),
) -> Checkpoint | RandomWeights:
    """Return the reader of a model's folder; "dummy": random weights by `seed`. Other formats: `ModelError`.

    quantization: that of the weights in memory. A GGUF file's blocks stay as they are only if it says so. overlays:
    folders of safetensors files whose tensors replace the model's, the last one first.
    """
    checkpoint = _open(folder, load_format, seed, quantization)
    if not overlays:
        return checkpoint
    if type(checkpoint) is not SafetensorsFolder:
        raise ModelError(f"{folder}: single tensors can be replaced only in models of safetensors files")
    return OverlaidCheckpoint(checkpoint, overlays)


def _open(folder: Path, load_format: str, seed: int, quantization: Quantization | None) -> Checkpoint | RandomWeights:
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ModelError(f"load_format must be auto, safetensors or dummy, got {load_format!r}")
    if load_format == "dummy":
        return RandomWeights(str(folder), seed)
    if is_derived(folder):
        schemes = quantization.schemes if isinstance(quantization, NamedQuantization) else ()
        return GGUFCheckpoint(folder, keeps={scheme.block for _, scheme in schemes})
    if (folder / PICKLED).is_file() and not any(folder.glob(WEIGHT_FILES)):
        return read_pickled(folder)
    config = read_config(folder).get(QUANTIZATION)
    decodes = isinstance(config, dict) and config.get("quant_method") == "bitsandbytes"
    return (BitsAndBytesFolder if decodes else SafetensorsFolder)(folder)
