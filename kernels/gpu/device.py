"""Properties of CUDA devices that decide which kernels they run, and how."""

from __future__ import annotations

import functools

import torch

from kernels.data.capability import compute_capability


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether it has compute capability 9.0: TMA and warpgroup MMA."""
    return device.type == "cuda" and compute_capability(device)[0] == 9


@functools.cache
def has_tensor_cores(device: torch.device) -> bool:
    """Return whether it has tensor cores for bfloat16."""
    return device.type == "cuda" and compute_capability(device) >= (8, 0)


@functools.cache
def multiplies_e4m3(device: torch.device) -> bool:
    """Return whether its tensor cores multiply e4m3."""
    return device.type == "cuda" and compute_capability(device) >= (8, 9)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of its multiprocessors; 4 for other devices, whose kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
