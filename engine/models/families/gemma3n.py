"""Gemma 3n: alternating updates of residual streams, embeddings of layers, sparse activations, shared caches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense, num_layers, slides, windows_of
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.gemma4 import KINDS, share_caches
from engine.models.families.other_norms import GELU, GEMMA
from engine.models.spec import AltUpSpec, DenseSpec, ModelSpec, PerLayerSpec


def gemma3n(config: Config) -> ModelSpec:
    """Gemma 3n E2B and E4B, text: several residual streams (AltUp), LAuReL, embeddings of layers, shared KV caches."""
    config = {"head_dim": 256, "num_key_value_heads": 2, **config}
    slide, count = slides(config, 5), num_layers(config)
    if not isinstance(config.get("rope_parameters"), dict):
        full, local = config.get("rope_theta", 1e6), config.get("rope_local_base_freq", 1e4)
        ropes = {"full_attention": {"rope_theta": full}, "sliding_attention": {"rope_theta": local}}
        config = {**config, "rope_scaling": None, "rope_parameters": ropes}
    bias = flag(config, "attention_bias")
    mixers = [
        replace(
            attention(config, qkv_bias=bias, o_bias=bias, qk_norm=True, layer_type=KINDS[here]), scale=1.0, v_norm=True
        )
        for here in slide
    ]
    mixers, unused = share_caches(mixers, slide, integer(config, "num_kv_shared_layers", 15, minimum=0))
    spec = decoder(config, mixers, _mlps(config), windows=windows_of(config, slide, 512), norms=GEMMA)
    vocab_size = integer(config, "vocab_size_per_layer_input", 262144)
    streams = integer(config, "altup_num_inputs", 4, minimum=2, maximum=16)
    return replace(
        spec,
        embedding_multiplier=math.sqrt(spec.hidden_size),
        logits_soft_cap=number(config, "final_logit_softcapping", 30.0),
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        per_layer=PerLayerSpec(
            size=integer(config, "hidden_size_per_layer_input", 256),
            vocab_size=vocab_size,
            is_partial=vocab_size < spec.vocab_size,
        ),
        altup=AltUpSpec(
            num_streams=streams,
            active=integer(config, "altup_active_idx", 0, minimum=0, maximum=streams - 1),
            scales_output=flag(config, "altup_correct_scale", True),
            laurel_rank=integer(config, "laurel_rank", 64),
        ),
        unused=unused if count else (),
    )


def _mlps(config: Config) -> list[DenseSpec]:
    count = num_layers(config)
    sparse = 10 if count > 10 else 0
    pattern = _of_layers(config, "activation_sparsity_pattern", [0.95] * sparse + [0.0] * (count - sparse))
    if not all(isinstance(share, int | float) and 0 <= share < 1 for share in pattern):
        raise ModelError(f"'activation_sparsity_pattern' must be numbers from 0 to below 1, got {pattern!r:.60}")
    sizes = _of_layers(config, "intermediate_size", [16384] * count)
    mlps = [dense({**config, "intermediate_size": size}, activations=GELU) for size in sizes]
    return [replace(mlp, sparsity=float(share)) for mlp, share in zip(mlps, pattern, strict=True)]


def _of_layers(config: Config, name: str, default: list[Any]) -> list[Any]:
    """Return a field that is one value, or one for each layer: one for each."""
    value = config.get(name)
    values = default if value is None else value if isinstance(value, list) else [value] * len(default)
    if len(values) != len(default):
        raise ModelError(f"{name!r} must be one value or {len(default)}, one for each layer, got {len(values)}")
    return values
