"""Converts the RoPE settings of config.json to a RopeSpec: one short function per scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.models.errors import ModelError
from engine.models.families.fields import Config, flag, integer, number
from engine.models.spec import RopeSpec

MAX_CONTEXT = 2**24  # largest position that float32, used for angles, represents exactly


def read_rope(
    config: Config, head_dim: int, *, layer_type: str = "", rotary_factor: float = 1.0, interleaved: bool = False
) -> RopeSpec:
    """Read the RoPE from `rope_scaling` and `rope_theta`, or from `rope_parameters` (both, also per type of layer).

    rotary_factor: the family's default of `partial_rotary_factor`.
    """
    fields = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(fields, dict):
        raise ModelError(f"'rope_scaling' must be an object, got {fields!r}")
    if any(isinstance(value, dict) for value in fields.values()):
        if not isinstance(fields.get(layer_type), dict):
            known = f"; it must have {layer_type}" if layer_type else " for this family"
            raise ModelError(f"'rope_parameters' per layer type are not supported{known}")
        fields = fields[layer_type]
    outside: Config = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config}
    fields = outside | fields
    rotary_dim = int(head_dim * number(fields, "partial_rotary_factor", rotary_factor))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(f"'partial_rotary_factor' must make an even part of head_dim={head_dim}, got {rotary_dim}")
    scaling = fields.get("rope_type") or fields.get("type") or "default"
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        raise ModelError(f"RoPE scaling {scaling!r} is not supported; supported: {', '.join(SCALINGS)}")
    theta = number(fields, "rope_theta", 10000.0)
    rope = RopeSpec(rotary_dim=rotary_dim, theta=theta, scaling=scaling, interleaved=interleaved)
    if scaling == "proportional":
        rope = replace(rope, rotary_dim=head_dim, rotating_dim=rotary_dim)
    return SCALINGS[scaling](rope, fields, config)


def phi_longrope(config: Config) -> Any:
    """Return Phi's `rope_scaling` under today's names. Raises `ModelError` if cos and sin have two factors."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict):
        return rope
    if (rope.get("rope_type") or rope.get("type")) in ("su", "yarn"):
        rope = {**rope, "rope_type": "longrope"}
    if rope.get("long_mscale") is None:
        return rope
    if rope["long_mscale"] != rope.get("short_mscale"):
        raise ModelError("'rope_scaling': 'long_mscale' must be 'short_mscale'")
    return {**rope, "attention_factor": rope["long_mscale"]}


def _default(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    return rope


def _linear(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    return replace(rope, factor=number(fields, "factor"))


def _proportional(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    return replace(rope, factor=number(fields, "factor", 1.0))


def _dynamic(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    original = integer(config, "max_position_embeddings")
    return replace(rope, factor=number(fields, "factor"), original_max_position_embeddings=original)


def _llama3(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    low, high = number(fields, "low_freq_factor"), number(fields, "high_freq_factor")
    if high < low:
        raise ModelError(f"'high_freq_factor' ({high}) must not be below 'low_freq_factor' ({low})")
    return replace(
        rope,
        factor=number(fields, "factor"),
        original_max_position_embeddings=_original_length(fields, config),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return yarn's factor of cos and sin: the square root of its factor of scores."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    original = _original_length(fields, config)
    factor = number(fields, "factor", integer(config, "max_position_embeddings") / original)
    attention_factor = yarn_magnitude(factor, 1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        mscale, of_all = (yarn_magnitude(factor, number(fields, name)) for name in ("mscale", "mscale_all_dim"))
        attention_factor = mscale / of_all
    return replace(
        rope,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=number(fields, "beta_fast", 32.0),
        beta_slow=number(fields, "beta_slow", 1.0),
        truncate=flag(fields, "truncate", True),
        attention_factor=number(fields, "attention_factor", attention_factor),
    )


def _longrope(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    original = _original_length(fields, config)
    factor = number(fields, "factor", integer(config, "max_position_embeddings") / original)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return replace(
        rope,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=number(fields, "attention_factor", attention_factor),
        short_factors=_factors(fields, "short_factor", rope.rotary_dim // 2),
        long_factors=_factors(fields, "long_factor", rope.rotary_dim // 2),
    )


def _factors(fields: Config, name: str, count: int) -> tuple[float, ...]:
    factors = fields.get(name)
    if not isinstance(factors, list) or len(factors) != count or not all(isinstance(f, int | float) for f in factors):
        raise ModelError(f"{name!r} must be a list of {count} numbers, one for each pair of channels, got {factors!r}")
    return tuple(map(float, factors))


SCALINGS: dict[str, Callable[[RopeSpec, Config, Config], RopeSpec]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def _original_length(fields: Config, config: Config) -> int:
    """Return the context before extension: a field beside the RoPE's or at the top level, else the context itself."""
    name = "original_max_position_embeddings"
    return integer(config if name in config else fields, name, integer(config, "max_position_embeddings"))


def context_length(config: Config, rope: RopeSpec | None) -> int:
    """Return the longest context that the model supports with its RoPE scaling, computed as in vLLM.

    Linear and dynamic scaling extend `max_position_embeddings`, yarn the original length; for llama3 and longrope,
    `max_position_embeddings` includes the extension.
    """
    trained = integer(config, "max_position_embeddings", maximum=MAX_CONTEXT)
    if rope is None or rope.scaling in ("default", "llama3", "longrope", "proportional"):
        return trained
    stretched = rope.factor * (rope.original_max_position_embeddings if rope.scaling == "yarn" else trained)
    if stretched > MAX_CONTEXT:
        raise ModelError(f"RoPE scaling by {rope.factor:g} passes the longest context, {MAX_CONTEXT}")
    return max(trained, int(stretched)) if rope.scaling == "yarn" else int(stretched)
