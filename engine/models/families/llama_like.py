"""Families with Llama's layers: RMSNorm before attention and before the MLP."""

from __future__ import annotations

from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense, num_layers, slides, windows_of
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.rope import phi_longrope
from engine.models.spec import AttentionSpec, ModelSpec


def llama(config: Config) -> ModelSpec:
    """Llama 1, 2 and 3.x, and other models with the same architecture."""
    bias = flag(config, "attention_bias")
    mlp = dense(config, bias=flag(config, "mlp_bias"))
    return decoder(config, attention(config, qkv_bias=bias, o_bias=bias), mlp)


def mistral(config: Config) -> ModelSpec:
    """Mistral: the sliding window, if there is one, applies to every layer."""
    window = 0 if config.get("sliding_window", 4096) is None else integer(config, "sliding_window", 4096)
    return decoder(config, attention(config, window=window), dense(config))


def ministral(config: Config) -> ModelSpec:
    """Ministral 8B: sliding windows by `layer_types`."""
    return decoder(config, attention(config), dense(config), windows=windows_of(config, slides(config)))


def qwen2(config: Config) -> ModelSpec:
    """Qwen2 and Qwen2.5: biases of query, key and value."""
    return decoder(config, attention(config, qkv_bias=True), dense(config), windows=qwen_windows(config))


def qwen3(config: Config) -> ModelSpec:
    """Qwen3: RMSNorm of each query and key head."""
    bias = flag(config, "attention_bias")
    mixer = attention({"head_dim": 128, **config}, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return decoder(config, mixer, dense(config), windows=qwen_windows(config))


def smollm3(config: Config) -> ModelSpec:
    """SmolLM3: some layers, by default every fourth, have no RoPE."""
    count, interval = num_layers(config), integer(config, "no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers")  # 1: the layer has RoPE
    if rotates is None:
        rotates = [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(rotates, list) or len(rotates) != count:
        raise ModelError(f"'no_rope_layers' must be a list of num_hidden_layers={count} flags, got {rotates!r}")
    bias = flag(config, "attention_bias")
    mixer = attention(config, qkv_bias=bias, o_bias=bias)
    mixers = [mixer if rope else replace(mixer, rope=None) for rope in rotates]
    spec = decoder(
        config, mixers, dense(config, bias=flag(config, "mlp_bias")), windows=windows_of(config, slides(config))
    )
    return replace(spec, tie_word_embeddings=flag(config, "tie_word_embeddings", True))


def seed_oss(config: Config) -> ModelSpec:
    """Seed-OSS: biases according to the configuration."""
    mixer = attention(config, qkv_bias=flag(config, "attention_bias", True), o_bias=flag(config, "attention_out_bias"))
    return decoder(config, mixer, dense(config, bias=flag(config, "mlp_bias")))


def granite(config: Config) -> ModelSpec:
    """Granite 3 and 4, dense: multipliers of embeddings, scores, residuals and logits."""
    spec = llama(config)
    scale, residual = (number(config, name, 1.0) for name in ("attention_multiplier", "residual_multiplier"))
    layers = (
        replace(layer, mixer=replace(layer.mixer, scale=scale), residual_multiplier=residual)
        for layer in spec.layers
        if isinstance(layer.mixer, AttentionSpec)
    )
    return replace(
        spec,
        layers=tuple(layers),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        logits_multiplier=1 / number(config, "logits_scaling", 1.0),
    )


def phi3(config: Config) -> ModelSpec:
    """Phi-3, Phi-3.5 and Phi-4: fused tensors, partial RoPE and LongRoPE ("su" and "yarn" are old names for it)."""
    config = {**config, "rope_scaling": phi_longrope(config)}
    window = 0 if config.get("sliding_window") is None else integer(config, "sliding_window")
    mixer = replace(attention(config, window=window), fused=True)
    return decoder(config, mixer, dense(config, fused="gate_up_proj"))


def ernie(config: Config) -> ModelSpec:
    """ERNIE 4.5, dense: interleaved RoPE."""
    bias = flag(config, "use_bias")
    spec = decoder(config, attention(config, qkv_bias=bias, o_bias=bias, interleaved=True), dense(config, bias=bias))
    return replace(spec, tie_word_embeddings=flag(config, "tie_word_embeddings", True))


def helium(config: Config) -> ModelSpec:
    """Helium: interleaved RoPE."""
    mixer = attention(config, qkv_bias=flag(config, "attention_bias"), interleaved=True)
    return decoder(config, mixer, dense(config, bias=flag(config, "mlp_bias")))


def arcee(config: Config) -> ModelSpec:
    """AFM of Arcee: a squared-ReLU MLP without a gate."""
    bias = flag(config, "attention_bias")
    mlp = dense(config, bias=flag(config, "mlp_bias"), activations=("relu2",), gated=False)
    return decoder(config, attention(config, qkv_bias=bias, o_bias=bias), mlp)


def qwen_windows(config: Config) -> list[int]:
    """Return the windows: by `layer_types`, else for the layers from `max_window_layers` on."""
    if config.get("layer_types") is not None:
        return windows_of(config, slides(config))
    count, slides_at_all = num_layers(config), flag(config, "use_sliding_window")
    first = integer(config, "max_window_layers", 28, minimum=0) if slides_at_all else count
    return windows_of(config, [layer >= first for layer in range(count)])
