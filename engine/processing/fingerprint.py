"""The `system_fingerprint` of answers: it changes exactly when the bytes of a deterministic answer may.

The engine process computes it, which has PyTorch loaded.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.models.files import fingerprint
from engine.version import __version__
from engine.worker.device import CpuDevice, Device, find_device

# Settings that change what a request computes. All others change only when and where.
SETTINGS = (
    "dtype", "quantization", "device", "kv_cache_dtype", "mamba_ssm_cache_dtype", "calculate_kv_scales", "hf_overrides",
    "load_format", "seed", "generation_config", "revision", "max_model_len",
)  # fmt: skip


def system_fingerprint(config: EngineConfig, folder: Path) -> str:
    """Return a hash of model, settings, software and machine; "" without `deterministic`: it would promise nothing.

    folder: the model's files.
    """
    if not config.deterministic:
        return ""
    parts = {
        "settings": {name: getattr(config, name) for name in SETTINGS},
        "model": fingerprint(folder),
        "versions": [__version__, torch.__version__],
        "machine": _machine(find_device(config.device)),
    }
    return "quire-" + sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _machine(device: Device) -> list[object]:
    """Return what the device's bytes depend on: a GPU's model and compiler, a CPU's instructions and threads."""
    if device.is_accelerator:
        return [device.name, version("triton")]
    return [CpuDevice.instruction_set(), os.environ.get("OMP_NUM_THREADS") or os.cpu_count()]
