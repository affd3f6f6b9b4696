"""Refuses what has no deterministic form, with the reason. See docs/determinism.md."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.spec import ModelSpec
from engine.worker.device import Device


def check_deterministic(config: EngineConfig, spec: ModelSpec, device: Device, dtype: torch.dtype) -> None:
    """Raise `ConfigError` if an operation of this configuration has no deterministic form."""
    reasons = {
        "device cuda": device.is_accelerator and "no GPU has checked its kernels yet",
        spec.architecture: spec.is_encoder and "an encoder generates no text",
        "dtype float16": dtype == torch.float16 and "the CPU's own kernels do not multiply it: use bfloat16 or float32",
        f"tensor_parallel_size {config.tensor_parallel_size}": config.tensor_parallel_size > 1
        and "sums over ranks have no fixed order yet: use data_parallel_size or pipeline_parallel_size",
        "reads_images in hf_overrides": spec.vision is not None and "the encoder of images has no deterministic form",
    }
    for name, reason in reasons.items():
        if reason:
            raise ConfigError(f"deterministic cannot be used with {name}: {reason}")
