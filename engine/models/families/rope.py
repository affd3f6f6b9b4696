"""RoPE settings in config.json → RopeSpec, one short function per scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.fields import Config, flag, integer, number
from engine.models.spec import RopeSpec

MAX_CONTEXT = 2**24  # positions that float32, in which angles are computed, tells apart


def read_rope(config: Config, head_dim: int) -> RopeSpec:
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
    theta = number(fields, "rope_theta", 10000.0)
    return SCALINGS[scaling](RopeSpec(rotary_dim=head_dim, theta=theta, scaling=scaling), fields, config)


def _default(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    return rope


def _linear(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    return replace(rope, factor=number(fields, "factor"))


def _dynamic(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    original = integer(config, "max_position_embeddings")
    return replace(rope, factor=number(fields, "factor"), original_max_position_embeddings=original)


def _llama3(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    low, high = number(fields, "low_freq_factor"), number(fields, "high_freq_factor")
    if high <= low:
        raise ModelError(f"'high_freq_factor' ({high}) must be above 'low_freq_factor' ({low})")
    return replace(
        rope,
        factor=number(fields, "factor"),
        original_max_position_embeddings=_original_length(fields, config),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: RopeSpec, fields: Config, config: Config) -> RopeSpec:
    original = _original_length(fields, config)
    factor = number(fields, "factor", integer(config, "max_position_embeddings") / original)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = magnitude(1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        attention_factor = magnitude(number(fields, "mscale")) / magnitude(number(fields, "mscale_all_dim"))
    return replace(
        rope,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=number(fields, "beta_fast", 32.0),
        beta_slow=number(fields, "beta_slow", 1.0),
        truncate=flag(fields, "truncate", True),
        attention_factor=number(fields, "attention_factor", attention_factor),
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
    return integer(config if name in config else fields, name, integer(config, "max_position_embeddings"))


def context_length(config: Config, rope: RopeSpec | None) -> int:
    """The longest context the model is meant for, its RoPE scaling counted as vLLM counts it.

    Linear and dynamic scaling stretch `max_position_embeddings`; yarn stretches the original length; llama3's
    `max_position_embeddings` is already stretched.
    """
    trained = integer(config, "max_position_embeddings", maximum=MAX_CONTEXT)
    if rope is None or rope.scaling in ("default", "llama3"):
        return trained
    stretched = rope.factor * (rope.original_max_position_embeddings if rope.scaling == "yarn" else trained)
    if stretched > MAX_CONTEXT:
        raise ModelError(f"RoPE scaling by {rope.factor:g} passes the longest context, {MAX_CONTEXT}")
    return max(trained, int(stretched)) if rope.scaling == "yarn" else int(stretched)
