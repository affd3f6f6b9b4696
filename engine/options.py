"""The choices that a configuration leaves open, made for the model, the device and the use."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.input_processor import context_length
from engine.models.spec import ModelSpec
from engine.worker.options import RunnerOptions

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def runner_options(config: EngineConfig, spec: ModelSpec, offline: bool) -> RunnerOptions:
    """The runner's options, nothing left open. `offline`: tuned for throughput. `ConfigError`: the device cannot do it."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device must be cpu (PyTorch sees no CUDA GPU here), got 'cuda'")
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if config.dtype != "auto":
        dtype = DTYPES[config.dtype]
    elif on_gpu:
        dtype = torch.float16 if spec.dtype == "float16" else torch.bfloat16
    else:
        dtype = torch.float32
    fp8 = config.kv_cache_dtype != "auto"
    if fp8 and on_gpu and (capability := torch.cuda.get_device_capability()) < (8, 9):
        raise ConfigError(
            f"kv_cache_dtype must be auto on this GPU, got {config.kv_cache_dtype!r}: its compute capability is "
            f"{capability[0]}.{capability[1]}, fp8 needs 8.9 (Ada, Hopper and later)"
        )
    return RunnerOptions(
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        dtype=dtype,
        kv_dtype=torch.float8_e4m3fn if fp8 else dtype,
        calculate_kv_scales=config.calculate_kv_scales,
        max_model_len=context_length(config, spec),
        max_num_seqs=config.max_num_seqs or (1024 if _is_large_gpu(on_gpu) else 256),
        max_num_batched_tokens=config.max_num_batched_tokens or (2048 if not on_gpu else 16384 if offline else 8192),
        block_size=config.block_size,
        load_format=config.load_format,
        seed=config.seed,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        enforce_eager=config.enforce_eager,
    )


def _is_large_gpu(on_gpu: bool) -> bool:
    """Whether the GPU's memory holds the contexts of a thousand requests."""
    return on_gpu and torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory >= 64 << 30
