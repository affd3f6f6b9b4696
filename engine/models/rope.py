"""Tables of rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.spec import QueryScaling, RopeSpec


def rope_table(rope: RopeSpec, num_positions: int) -> Tensor:
    """Return cos and sin of the angles at positions [0, num_positions): [num_positions, rotary_dim] float32, on a CPU.

    The first half of a row is cos, the second sin, both scaled by the attention factor. Angles are position · frequency
    in float32, as in training.

    Dynamic NTK scaling is applied per position: a position below the original length uses the plain frequencies, a
    position p beyond it those of a sequence of length p + 1. So a token's key does not depend on later tokens, can be
    cached and reused, and equals that of token-by-token decoding. LongRoPE uses its long factors at all positions if
    the table extends beyond the original length.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * _frequencies(rope, positions)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor


def sectioned_rows(rope: RopeSpec, sections: Sequence[int], positions: Tensor, *, interleaved: bool = True) -> Tensor:
    """Return rows as of `rope_table` for tokens of images, whose pairs turn by time, row or column.

    positions [3, n] int64: time, row and column. Of the pairs, those at 1, 4, 7 … turn by row and those at 2, 5, 8 … by
    column, as many as `sections` says, and all others by time. Not interleaved: the first pairs turn by time, those
    that follow by row, and the last ones by column.
    """
    frequencies = _frequencies(rope, positions[0].float()).to(positions.device)
    axis = torch.zeros(len(frequencies), dtype=torch.int64, device=positions.device)
    for index, count in enumerate(sections[1:], 1):
        first = sum(sections[:index])
        axis[slice(index, 3 * count, 3) if interleaved else slice(first, first + count)] = index
    angles = positions.float().T[:, axis] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor


def query_scales(scaling: QueryScaling, positions: Tensor) -> Tensor:
    """Return the factors [T] float32 of queries at positions [T]."""
    return 1 + scaling.beta * torch.log1p(torch.floor((positions + scaling.offset) / scaling.length))


def _frequencies(rope: RopeSpec, positions: Tensor) -> Tensor:
    """Return the angle per position [rotary_dim / 2], or [num_positions, rotary_dim / 2] where it depends on that."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    if rope.scaling == "dynamic":
        return 1.0 / _dynamic_base(rope, positions)[:, None] ** exponents
    plain = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    if rope.scaling == "yarn":
        return _yarn(rope, plain)
    if rope.scaling == "longrope":
        is_long = len(positions) > rope.original_max_position_embeddings
        return plain / torch.tensor(rope.long_factors if is_long else rope.short_factors)
    if rope.scaling == "proportional":
        plain[rope.rotating_dim // 2 :] = 0
        return plain / rope.factor
    assert rope.scaling == "default", rope.scaling
    return plain


def _dynamic_base(rope: RopeSpec, positions: Tensor) -> Tensor:
    """Return theta [num_positions] for the sequence that ends at each position. It grows beyond the original length."""
    lengths = (positions + 1).clamp(min=rope.original_max_position_embeddings)
    stretch = rope.factor * lengths / rope.original_max_position_embeddings - (rope.factor - 1)
    return rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Stretch long wavelengths, keep short ones, and blend the others by their rotations within the original length."""
    rotations = rope.original_max_position_embeddings * plain / (2 * math.pi)
    if rope.low_freq_factor == rope.high_freq_factor:  # Llama 4 Scout: none are blended
        return torch.where(rotations < rope.low_freq_factor, plain / rope.factor, plain)
    kept = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Keep fast dimensions and stretch slow ones, with a linear ramp in between (arXiv 2309.00071)."""
    low, high = (_yarn_dimension(rope, rotations) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float32) - low) / (high - low or 0.001)
    stretched = ramp.clamp(0, 1)
    return (1 - stretched) * plain + stretched * plain / rope.factor


def _yarn_dimension(rope: RopeSpec, rotations: float) -> float:
    """Return the (fractional) dimension that makes `rotations` full rotations within the original length."""
    original = rope.original_max_position_embeddings
    return rope.rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
