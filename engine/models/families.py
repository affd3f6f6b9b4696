"""config.json → ModelSpec, one short function per family. Knows Hugging Face's field names; never knows tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.models.errors import ModelError
from engine.models.files import read_json
from engine.models.generation_config import read_eos_token_ids, token_ids
from engine.models.pooling_config import is_embedding_model
from engine.models.spec import ModelSpec, RopeSpec

Config = dict[str, Any]


def read_spec(folder: Path) -> ModelSpec:
    """The specification of the model in `folder`.

    End-of-text ids are those of generation_config.json, then those that only config.json names. ModelError names the
    file and the field that is missing, wrong or not supported.
    """
    path = folder / "config.json"
    config = read_json(path)
    try:
        spec = _family(config)(config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    eos = dict.fromkeys((*read_eos_token_ids(folder), *spec.eos_token_ids))
    spec = replace(spec, eos_token_ids=tuple(eos))
    if spec.architecture in FAMILIES and not is_embedding_model(folder):
        return spec
    return replace(spec, has_head=False, tie_word_embeddings=True)  # so that no memory is taken for one


def _family(config: Config) -> Callable[[Config], ModelSpec]:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(f"'architectures' must be a list of one name, got {names!r}")
    for name in (names[0], names[0].removesuffix("Model") + "ForCausalLM"):  # LlamaModel: without an output head
        if name in FAMILIES:
            return FAMILIES[name]
    raise ModelError(f"architecture {names[0]!r} is not supported; supported: {', '.join(FAMILIES)}")


# Families. Each says only how it differs from the common decoder.


def llama(config: Config) -> ModelSpec:
    """Llama 1, 2 and 3.x, and what is shaped like them."""
    bias = _flag(config, "attention_bias")
    return _spec(config, qkv_bias=bias, o_bias=bias, mlp_bias=_flag(config, "mlp_bias"))


def mistral(config: Config) -> ModelSpec:
    """Mistral: every layer slides when there is a window (null: none does)."""
    window = 0 if config.get("sliding_window", 4096) is None else _integer(config, "sliding_window", 4096)
    return _spec(config, sliding_windows=(window,) * _integer(config, "num_hidden_layers"))


def qwen2(config: Config) -> ModelSpec:
    """Qwen2 and Qwen2.5: bias on query, key and value."""
    return _spec(config, qkv_bias=True, sliding_windows=_qwen_windows(config))


def qwen3(config: Config) -> ModelSpec:
    """Qwen3: RMSNorm of each query and key head."""
    bias = _flag(config, "attention_bias")
    config = {"head_dim": 128, **config}
    return _spec(config, qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=_qwen_windows(config))


FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def _qwen_windows(config: Config) -> tuple[int, ...]:
    """The window of each layer: by `layer_types`, else for the layers from `max_window_layers` on."""
    num_layers = _integer(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        first = (
            _integer(config, "max_window_layers", 28, minimum=0) if _flag(config, "use_sliding_window") else num_layers
        )
        slides = [layer >= first for layer in range(num_layers)]
    elif not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"'layer_types' must be a list of num_hidden_layers={num_layers} names, got {types!r}")
    elif unknown := sorted({str(name) for name in types} - {"full_attention", "sliding_attention"}):
        raise ModelError(f"'layer_types' may name full_attention and sliding_attention, got {', '.join(unknown)}")
    else:
        slides = [name == "sliding_attention" for name in types]
    window = _integer(config, "sliding_window") if any(slides) else 0
    return tuple(window if slide else 0 for slide in slides)


def _quantises_weights(quantization: Any) -> bool:
    """False where a checkpoint quantises nothing, or only says how to quantise its KV cache."""
    if not isinstance(quantization, dict):
        return quantization is not None
    groups = quantization.get("config_groups")
    if quantization.get("quant_method") == "compressed-tensors" and isinstance(groups, dict):
        return any(not isinstance(group, dict) or group.get("weights") is not None for group in groups.values())
    return True


def _spec(
    config: Config,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_windows: tuple[int, ...] | None = None,
) -> ModelSpec:
    """What all families share."""
    if _quantises_weights(config.get("quantization_config")):
        raise ModelError(
            "'quantization_config': quantised checkpoints are not supported yet; use the unquantised model"
        )
    if not _flag(config, "is_causal", True):
        raise ModelError("'is_causal' must be true: attention to later tokens is not supported")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"'hidden_act' {activation!r} is not supported; supported: silu")
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ModelError(f"'dtype' must be bfloat16, float16 or float32, got {dtype!r}")

    hidden_size = _integer(config, "hidden_size")
    num_heads = _integer(config, "num_attention_heads")
    num_kv_heads = _integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"'num_attention_heads' ({num_heads}) must be a multiple of 'num_key_value_heads' ({num_kv_heads})"
        )
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(f"'hidden_size' ({hidden_size}) must be a multiple of 'num_attention_heads' ({num_heads})")
    head_dim = _integer(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"'head_dim' must be even, got {head_dim}")

    num_layers = _integer(config, "num_hidden_layers")
    bos = token_ids(config, "bos_token_id")
    return ModelSpec(
        architecture=config["architectures"][0],
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(config, "vocab_size"),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
        rope=_rope(config, head_dim),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_windows=sliding_windows or (0,) * num_layers,
        attention_scale=head_dim**-0.5,
        soft_cap=0.0,
        dtype=dtype,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(config, "eos_token_id"),
    )


# Rotary embeddings


def _rope(config: Config, head_dim: int) -> RopeSpec:
    """From `rope_scaling` + `rope_theta`, or from `rope_parameters`, which holds both."""
    fields = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(fields, dict):
        raise ModelError(f"'rope_scaling' must be an object, got {fields!r}")
    if any(isinstance(value, dict) for value in fields.values()):
        raise ModelError("'rope_parameters' per layer type are not supported")
    outside: Config = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config}
    fields = outside | fields
    if fields.get("partial_rotary_factor") not in (None, 1):
        raise ModelError(f"'partial_rotary_factor' must be 1, got {fields['partial_rotary_factor']!r}")
    scaling = fields.get("rope_type") or fields.get("type") or "default"
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        raise ModelError(f"RoPE scaling {scaling!r} is not supported; supported: {', '.join(SCALINGS)}")
    theta = _number(fields, "rope_theta", 10000.0)
    return SCALINGS[scaling](RopeSpec(rotary_dim=head_dim, theta=theta, scaling=scaling), fields, config)


def _default(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    return rope


def _linear(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    return replace(rope, factor=_number(fields, "factor"))


def _dynamic(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    original = _integer(config, "max_position_embeddings")
    return replace(rope, factor=_number(fields, "factor"), original_max_position_embeddings=original)


def _llama3(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
    if high <= low:
        raise ModelError(f"'high_freq_factor' ({high}) must be above 'low_freq_factor' ({low})")
    return replace(
        rope,
        factor=_number(fields, "factor"),
        original_max_position_embeddings=_original_length(fields, config),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    original = _original_length(fields, config)
    factor = _number(fields, "factor", _integer(config, "max_position_embeddings") / original)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = magnitude(1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        attention_factor = magnitude(_number(fields, "mscale")) / magnitude(_number(fields, "mscale_all_dim"))
    return replace(
        rope,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_number(fields, "beta_fast", 32.0),
        beta_slow=_number(fields, "beta_slow", 1.0),
        truncate=_flag(fields, "truncate", True),
        attention_factor=_number(fields, "attention_factor", attention_factor),
    )


SCALINGS: dict[str, Callable[[RopeSpec, Config, Config], RopeSpec]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _original_length(fields: Config, config: Config) -> int:
    """The context before stretching: next to the RoPE fields or at the top, else the context as it is."""
    name = "original_max_position_embeddings"
    return _integer(config if name in config else fields, name, _integer(config, "max_position_embeddings"))


# Fields. `default` also stands in for null; without one the field must be there.


def _integer(config: Config, name: str, default: int | None = None, *, minimum: int = 1) -> int:
    value = _field(config, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ModelError(f"{name!r} must be an integer of at least {minimum}, got {value!r}")
    return value


def _number(config: Config, name: str, default: float | None = None) -> float:
    value = _field(config, name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"{name!r} must be a positive number, got {value!r}")
    return float(value)


def _flag(config: Config, name: str, default: bool = False) -> bool:
    value = _field(config, name, default)
    if not isinstance(value, bool):
        raise ModelError(f"{name!r} must be true or false, got {value!r}")
    return value


def _field(config: Config, name: str, default: Any) -> Any:
    value = config.get(name)
    if value is None and default is None:
        raise ModelError(f"{name!r} is missing")
    return default if value is None else value
