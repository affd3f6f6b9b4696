"""What all families have in common: the decoder's parts from config.json's usual fields, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.rope import context_length, read_rope
from engine.models.generation_config import token_ids
from engine.models.quantization import read_quantization
from engine.models.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec


def attention(
    config: Config, *, window: int = 0, qkv_bias: bool = False, o_bias: bool = False, qk_norm: bool = False
) -> AttentionSpec:
    if not flag(config, "is_causal", True):
        raise ModelError("'is_causal' must be true: attention to later tokens is not supported")
    hidden_size = integer(config, "hidden_size")
    num_heads = integer(config, "num_attention_heads")
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"'num_attention_heads' ({num_heads}) must be a multiple of 'num_key_value_heads' ({num_kv_heads})"
        )
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(f"'hidden_size' ({hidden_size}) must be a multiple of 'num_attention_heads' ({num_heads})")
    head_dim = integer(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"'head_dim' must be even, got {head_dim}")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim),
        window=window,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )


def dense(config: Config, *, bias: bool = False) -> DenseSpec:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"'hidden_act' {activation!r} is not supported; supported: silu")
    return DenseSpec(intermediate_size=integer(config, "intermediate_size"), bias=bias)


def decoder(config: Config, mixer: AttentionSpec, mlp: DenseSpec, *, windows: Sequence[int] | None = None) -> ModelSpec:
    """A decoder whose layers are alike but for their windows, where those are given."""
    if windows is None:
        windows = (mixer.window,) * integer(config, "num_hidden_layers")
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ModelError(f"'dtype' must be bfloat16, float16 or float32, got {dtype!r}")
    bos = token_ids(config, "bos_token_id")
    return ModelSpec(
        architecture=config["architectures"][0],
        hidden_size=integer(config, "hidden_size"),
        vocab_size=integer(config, "vocab_size"),
        layers=tuple(LayerSpec(mixer=replace(mixer, window=window), mlp=mlp) for window in windows),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        context_length=context_length(config, mixer.rope),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        dtype=dtype,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(config, "eos_token_id"),
        quantization=read_quantization(config.get("quantization_config")),
    )
