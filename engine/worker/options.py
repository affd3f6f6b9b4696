"""What a model runner is built with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.worker.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """All resolved: no "auto" left."""

    device: Device
    dtype: torch.dtype
    kv_dtype: torch.dtype  # `dtype` or torch.float8_e4m3fn
    max_model_len: int
    shortens_context: bool = False  # where the KV cache does not hold so many tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = 16
    load_format: str = "auto"
    seed: int = 0
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    calculate_kv_scales: bool = False
    enforce_eager: bool = False
    expert_load_interval: int = 0  # of steps with prompts, in which experts' tokens are counted; 0: in none
    num_ranks_per_stage: int = 1  # that hold a stage of the model together, each on a device of its own
    num_stages: int = 1  # of successive layers
