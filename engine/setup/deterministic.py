"""Refuses what has no deterministic form, with the reason. See docs/determinism.md."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.spec import AttentionSpec, ModelSpec
from engine.worker.device import Device

# What has no deterministic form on GPUs, and what has one that no GPU has run yet: `python -m tests.gpu determinism`.
MISSING = frozenset({"block-sparse attention", "compress_experts", "lora_embeddings"})
UNCHECKED = frozenset({"tensor_parallel_size"})


def check_deterministic(config: EngineConfig, spec: ModelSpec, device: Device, dtype: torch.dtype) -> None:
    """Raise `ConfigError` if an operation of this configuration has no deterministic form."""
    reasons = {
        spec.architecture: spec.is_encoder and "an encoder generates no text",
        "images": spec.vision is not None
        and device.is_accelerator
        and "the encoder of images has no deterministic form on GPUs: leave it out by language_model_only",
        f"tensor_parallel_size {config.tensor_parallel_size}": _of_ranks(config, spec),
        **(_of_gpus(config, spec) if device.is_accelerator else _of_cpus(dtype)),
    }
    for name, reason in reasons.items():
        if reason:
            raise ConfigError(f"deterministic cannot be used with {name}: {reason}")


def _of_ranks(config: EngineConfig, spec: ModelSpec) -> str:
    """Return why ranks would compute other bytes than one does; "": they do not."""
    mixers = [layer.mixer for layer in spec.layers]
    attention = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
    reasons = {
        "sums are divided in eighths: use 2, 4 or 8 ranks": config.tensor_parallel_size not in (1, 2, 4, 8),
        "PyTorch computes the heads of recurrent layers together": spec.has_states,
        "PyTorch computes adapters, in an order that depends on a rank's part": config.enable_lora,
        "norms over the heads of all ranks have no fixed order": any(each.qk_norm_over_heads for each in attention),
        "block-sparse attention has no form for some of the heads": any(each.sparse for each in attention),
    }
    wrong = [reason for reason, applies in reasons.items() if applies and config.tensor_parallel_size > 1]
    return f"{wrong[0]} (data_parallel_size and pipeline_parallel_size have no such limit)" if wrong else ""


def _of_cpus(dtype: torch.dtype) -> dict[str, str | bool]:
    own = "the CPU's own kernels do not multiply it: use bfloat16 or float32"
    return {"dtype float16": dtype == torch.float16 and own}


def _of_gpus(config: EngineConfig, spec: ModelSpec) -> dict[str, str | bool]:
    mixers = [layer.mixer for layer in spec.layers]
    used = {
        "block-sparse attention": any(isinstance(each, AttentionSpec) and each.sparse for each in mixers),
        "compress_experts": config.compress_experts,
        "lora_embeddings": config.enable_lora and config.lora_embeddings,
        "tensor_parallel_size": config.tensor_parallel_size > 1,
    }
    reasons = dict.fromkeys(MISSING, "it has no deterministic form on GPUs yet")
    reasons |= dict.fromkeys(UNCHECKED, "its deterministic form has not run on a GPU yet")
    return {name: is_used and reasons.get(name, "") for name, is_used in used.items()}
