"""The mixers of decoder layers: attention and recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from engine.models.attention import Attention
from engine.models.disentangled import DisentangledAttention
from engine.models.kda import KimiDeltaAttention
from engine.models.latent import LatentAttention
from engine.models.mamba2 import Mamba2
from engine.models.matrix import Scope
from engine.models.norms import MakeNorm
from engine.models.recurrent import GatedDeltaNet, ShortConv
from engine.models.recurrent_spec import DeltaNetSpec, KdaSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from engine.models.spec import AttentionSpec, LatentSpec

Mixer: TypeAlias = Attention | LatentAttention | ShortConv | GatedDeltaNet | Mamba2 | KimiDeltaAttention
LayerCache: TypeAlias = "Tensor | Sequence[Tensor]"  # keys and values, latents, or the parts of a block of states


def make_mixer(
    spec: AttentionSpec | LatentSpec | RecurrentSpec,
    hidden_size: int,
    cos_sin: Tensor | None,
    make_norm: MakeNorm,
    scope: Scope,
) -> Mixer:
    """Create a layer's mixer. cos_sin: `rope_table` of its RoPE. `scope`: of the layer."""
    if isinstance(spec, LatentSpec):
        assert cos_sin is not None
        return LatentAttention(spec, hidden_size, cos_sin, scope / "self_attn")
    if isinstance(spec, AttentionSpec):
        kind = Attention if spec.disentangled is None else DisentangledAttention
        return kind(spec, hidden_size, cos_sin, make_norm, scope / "self_attn")
    if isinstance(spec, DeltaNetSpec):
        return GatedDeltaNet(spec, hidden_size, scope / "linear_attn")
    if isinstance(spec, Mamba2Spec):
        return Mamba2(spec, hidden_size, scope / "mamba")
    if isinstance(spec, KdaSpec):
        return KimiDeltaAttention(spec, hidden_size, scope / "self_attn")
    assert isinstance(spec, ShortConvSpec)
    return ShortConv(spec, hidden_size, scope / "conv")
