"""Chooses the owner of attention's step data for each layer of a model."""

from __future__ import annotations

from engine.models.recurrent_spec import RecurrentSpec
from engine.models.spec import AttentionSpec, LatentSpec, ModelSpec
from engine.worker.attention.fp8_prefill import Fp8PrefillAttention, scratch_bytes, upcast_layers
from engine.worker.attention.group_attention import GroupAttention
from engine.worker.attention.latent import LatentGroupAttention
from engine.worker.attention.states import StateSteps
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.options import RunnerOptions


def layer_attention(spec: ModelSpec, layout: KVCacheLayout, options: RunnerOptions) -> list[GroupAttention]:
    """Return the owner of each layer's attention data. Layers of a cache group that attend alike share one.

    `spec`: of this rank, with the layers of all stages: these must choose the same captured sizes.
    """
    upcast, size = upcast_layers(spec, layout, options), options.block_size
    num_scratch_bytes = scratch_bytes(upcast)

    def make(index: int, mixer: AttentionSpec | LatentSpec | RecurrentSpec) -> GroupAttention:
        group = layout.groups[index]
        if isinstance(mixer, RecurrentSpec):
            return StateSteps(index, next(i for i, each in enumerate(layout.groups) if not each.is_state), size)
        if isinstance(mixer, LatentSpec):
            return LatentGroupAttention(mixer, index, group, options)
        if index in upcast and mixer.widens:
            return Fp8PrefillAttention(mixer, index, group, options, upcast[index], num_scratch_bytes)
        return GroupAttention(mixer, index, group, options)

    kinds = [
        (index, getattr(layer.mixer, "sparse", None)) for index, layer in zip(layout.group_of, spec.layers, strict=True)
    ]
    mixers = dict(zip(kinds, (layer.mixer for layer in spec.layers), strict=True))
    made = {kind: make(kind[0], mixer) for kind, mixer in mixers.items()}
    return [made[kind] for kind in kinds]
