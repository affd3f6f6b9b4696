"""Resolves the settings that a configuration leaves open, for the model, the device and the use."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.drafters.loading import holds_mtp
from engine.models.hub import resolve_model
from engine.models.quantization import Quantization, choose_quantization
from engine.models.spec import LatentSpec, ModelSpec
from engine.processing.input_processor import context_length
from engine.setup import speculative
from engine.setup.deterministic import check_deterministic
from engine.setup.speculative import SpeculativeConfig
from engine.worker.device import CpuDevice, Device, DeviceNotFoundError, find_device
from engine.worker.options import AdapterOptions, RunnerOptions

# The host tier by default: a fraction of the free host memory, at most so many bytes for a replica.
HOST_FRACTION, MOST_HOST_BYTES = 0.25, 64 << 30
HOST_RESERVE = 0.5  # fraction of the free host memory that stays free for other programs
STAGED_MEMORY = 10 << 30  # smaller GPUs have no host tier by default: the buffers for copies would take much of theirs
STEP_DRAFTS = 192  # of all requests in a step
SPLIT_DRAFTS = True  # see `RunnerOptions.splits_drafts`
LARGE_MEMORY = 64 << 30  # bytes of GPU memory from which 1024 requests run at once by default
VERY_LARGE_MEMORY = 128 << 30  # from which the largest steps that decompress experts have room
DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def device_of(config: EngineConfig) -> Device:
    """Return the device that the configuration asks for. `ConfigError` if it does not exist."""
    try:
        device = find_device(config.device)
    except DeviceNotFoundError as error:
        raise ConfigError(str(error)) from None
    size = config.num_ranks
    is_local = device.is_accelerator and config.distributed_executor_backend == "mp"
    if size > 1 and is_local and size > (count := torch.cuda.device_count()):
        raise ConfigError(
            f"the parallel sizes together must be at most {count}, the GPUs that PyTorch sees here, got {size}; with "
            "distributed_executor_backend ray they may be those of several machines"
        )
    return device


def quantization_in_memory(spec: ModelSpec, config: EngineConfig, device: Device) -> Quantization | None:
    """Return the quantization of the weights on a device. Raises `ModelError` if the configured one does not apply."""
    # Products of quantised weights round activations on CPUs, and some types' scales on GPUs.
    exact = DTYPES.get(config.dtype) == torch.float32
    on_cpu = not device.is_accelerator
    return choose_quantization(spec.quantization, config.quantization, rounds_head=on_cpu, decodes=exact)


def runner_options(config: EngineConfig, spec: ModelSpec, offline: bool, device: Device | None = None) -> RunnerOptions:
    """Return the fully resolved options of the runner. `ConfigError` if the device does not exist or lacks a feature.

    `offline`: choose defaults for throughput. `device`: default: the device that `config` asks for.
    """
    device = device or device_of(config)
    dtype = _dtype(config, spec, device)
    _check_caches(config, spec, device)
    if config.deterministic:
        check_deterministic(config, spec, device, dtype)
    drafts = drafts_of(config, spec, device)
    _check_compression(config, device, dtype)
    state_dtype = config.mamba_ssm_cache_dtype
    max_num_batched_tokens = config.max_num_batched_tokens or _step_tokens(config, device, offline)
    if spec.is_encoder:
        max_num_batched_tokens = _encoder_step_tokens(config, spec, max_num_batched_tokens)
    if spec.vision is not None and max_num_batched_tokens < spec.vision.num_whole:
        raise ConfigError(
            f"max_num_batched_tokens must be at least {spec.vision.num_whole}: so many tokens of an image are computed "
            f"in one step; got {max_num_batched_tokens}, or use --language-model-only"
        )
    is_large = device.is_accelerator and device.memory().total >= LARGE_MEMORY
    return RunnerOptions(
        device=device,
        dtype=dtype,
        kv_dtype=dtype if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn,
        state_dtype=DTYPES["float32" if state_dtype == "auto" else state_dtype],
        calculate_kv_scales=config.calculate_kv_scales,
        max_model_len=context_length(config, spec),
        shortens_context=config.max_model_len is None,
        max_num_seqs=config.max_num_seqs or (1024 if is_large else 256),
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=config.block_size,
        load_format=config.load_format,
        weight_overlays=config.weight_overlays,
        seed=config.seed,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        num_states_override=config.num_states_override if spec.has_states else None,
        enforce_eager=config.enforce_eager,
        deterministic=config.deterministic,
        compress_experts=config.compress_experts,
        expert_load_interval=config.expert_load_interval,
        adapters=_adapters(config),
        num_ranks_per_stage=config.tensor_parallel_size,
        num_stages=config.pipeline_parallel_size,
        max_step_drafts=STEP_DRAFTS if drafts is not None else 0,
        max_request_drafts=drafts.num_speculative_tokens if drafts is not None else 0,
        rejects_drafts=drafts is not None and drafts.rejects,
        imposed_acceptance=drafts.imposed if drafts is not None else None,
        # States are computed token after token.
        splits_drafts=SPLIT_DRAFTS and drafts is not None and device.is_accelerator and not spec.has_states,
        whole_prompts=spec.is_encoder,
        sleeps_fast=config.enable_sleep_mode,
        host_cache_bytes=0 if spec.is_encoder else _host_cache_bytes(config, device),
        host_reserve_bytes=int(CpuDevice().memory().free * HOST_RESERVE) if config.kv_offloading_size is None else 0,
    )


def _dtype(config: EngineConfig, spec: ModelSpec, device: Device) -> torch.dtype:
    """Return the dtype of activations, and of weights that are not quantised."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.is_accelerator:
        return torch.float16 if spec.dtype == "float16" else torch.bfloat16
    return torch.bfloat16 if device.multiplies_bfloat16 and spec.dtype != "float32" else torch.float32


def _check_caches(config: EngineConfig, spec: ModelSpec, device: Device) -> None:
    """Raises `ConfigError` if the device or the model lacks what the settings of caches need."""
    fp8, state_dtype = config.kv_cache_dtype != "auto", config.mamba_ssm_cache_dtype
    if fp8 and not device.supports_fp8_cache:
        raise ConfigError(
            f"kv_cache_dtype must be auto on this GPU, got {config.kv_cache_dtype!r}: fp8 needs compute capability 8.9 "
            f"(Ada, Hopper and later), and that of {device.name} is {'.'.join(map(str, device.capability or ()))}"
        )
    if fp8 and any(isinstance(layer.mixer, LatentSpec) for layer in spec.layers):
        raise ConfigError(f"kv_cache_dtype must be auto for latent attention, got {config.kv_cache_dtype!r}")
    if state_dtype != "auto" and not spec.has_states:
        raise ConfigError(f"mamba_ssm_cache_dtype {state_dtype!r} needs a model with recurrent layers: leave it out")


def _check_compression(config: EngineConfig, device: Device, dtype: torch.dtype) -> None:
    """Raises `ConfigError` if compressed experts cannot be computed here."""
    if config.compress_experts and (device.capability or (0, 0))[0] != 9:
        raise ConfigError(
            f"compress_experts needs a Hopper GPU (compute capability 9.0), and this is {device.name}: leave it out"
        )
    if config.compress_experts and dtype != torch.bfloat16:
        raise ConfigError(f"compress_experts needs dtype bfloat16, got {str(dtype).removeprefix('torch.')}")


def _host_cache_bytes(config: EngineConfig, device: Device) -> int:
    """Return the host memory of each rank for evicted blocks. By default there is none on a CPU, where the KV cache is
    in the same memory, nor with several ranks or sleep mode: no GPU has checked the host tier with these.
    """
    if not config.enable_prefix_caching:
        return 0
    if config.kv_offloading_size is not None:
        return int(config.kv_offloading_size * 2**30) // config.num_ranks
    if not device.is_accelerator or device.memory().total < STAGED_MEMORY:
        return 0
    if config.num_ranks > 1 or config.enable_sleep_mode:
        return 0
    return min(int(CpuDevice().memory().free * HOST_FRACTION) // config.data_parallel_size, MOST_HOST_BYTES)


def drafts_of(config: EngineConfig, spec: ModelSpec, device: Device) -> SpeculativeConfig | None:
    """Return the settings of drafts; None: there are none, as for a model that generates nothing."""
    given = config.speculative_config
    if (given is None and spec.has_states and not speculative.WITH_STATES) or not spec.has_head:
        return None
    found = speculative.speculative_config(given, device.is_accelerator)
    if given is None and found is not None and _holds_mtp(config, spec):
        return speculative.parse({"method": "mtp"})  # lookup is beside it
    return found


def _holds_mtp(config: EngineConfig, spec: ModelSpec) -> bool:
    """Return whether the checkpoint has prediction layers that can draft with this configuration."""
    if not spec.mtp or config.pipeline_parallel_size > 1:
        return False
    folder = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir, weights=False)
    return holds_mtp(folder, spec, config.load_format)


def _adapters(config: EngineConfig) -> AdapterOptions | None:
    if not config.enable_lora:
        return None
    return AdapterOptions(
        num_slots=config.max_loras,
        max_rank=config.max_lora_rank,
        num_loaded=config.num_loaded_loras,
        experts=config.lora_experts,
        max_tokens=config.lora_tokens if config.lora_embeddings else None,
    )


def _encoder_step_tokens(config: EngineConfig, spec: ModelSpec, wanted: int) -> int:
    """Return the tokens of an encoder's step, at least the longest text's. `ConfigError` for an unusable setting."""
    unusable = {
        "speculative_config": config.speculative_config is not None and "an encoder generates no text",
        "kv_offloading_size": bool(config.kv_offloading_size) and "an encoder caches nothing",
        "prefix_cache_file": config.prefix_cache_file is not None and "an encoder caches nothing",
        "kv_cache_dtype": config.kv_cache_dtype != "auto" and "an encoder caches nothing",
        "enable_lora": config.enable_lora and "adapters of encoders are not supported",
    }
    for name, reason in unusable.items():
        if reason:
            raise ConfigError(f"{name} cannot be used with {spec.architecture}: {reason}")
    longest = context_length(config, spec)
    if config.max_num_batched_tokens is not None and wanted < longest:
        raise ConfigError(
            f"max_num_batched_tokens must be at least max_model_len={longest} for an encoder, which reads a text in "
            f"one step, got {wanted}: raise it or lower --max-model-len"
        )
    return max(wanted, longest)


def _step_tokens(config: EngineConfig, device: Device, offline: bool) -> int:
    """The default of `max_num_batched_tokens`. A large step decompresses all experts, so it is to be very large."""
    if not device.is_accelerator:
        return 2048
    if not offline:
        return 8192
    if not config.compress_experts:
        return 16384
    return 262144 if device.memory().total >= VERY_LARGE_MEMORY else 65536
