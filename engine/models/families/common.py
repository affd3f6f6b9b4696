"""Common code of all families: the decoder's parts from the usual fields of config.json, with checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from engine.models.errors import ModelError
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.rope import context_length, read_rope, yarn_magnitude
from engine.models.generation_config import token_ids
from engine.models.quantization import Renames, read_quantization
from engine.models.recurrent_spec import RecurrentSpec
from engine.models.spec import AttentionSpec, DenseSpec, LatentSpec, LayerSpec, ModelSpec, MoESpec, Norms

Mixer = AttentionSpec | LatentSpec | RecurrentSpec
MAX_LAYERS = 1024  # their specifications are created before the weights are checked
MAX_HEAD_DIM = 1024


def attention(
    config: Config,
    *,
    window: int = 0,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    rotary_factor: float = 1.0,
    interleaved: bool = False,
    layer_type: str = "",
) -> AttentionSpec:
    """Create the attention. layer_type: in families with one RoPE for each type. Others: see `read_rope`."""
    hidden_size = integer(config, "hidden_size")
    num_heads = integer(config, "num_attention_heads")
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"'num_attention_heads' ({num_heads}) must be a multiple of 'num_key_value_heads' ({num_kv_heads})"
        )
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(f"'hidden_size' ({hidden_size}) must be a multiple of 'num_attention_heads' ({num_heads})")
    head_dim = integer(config, "head_dim", hidden_size // num_heads, maximum=MAX_HEAD_DIM)
    if head_dim % 2:
        raise ModelError(f"'head_dim' must be even, got {head_dim}")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(config, head_dim, layer_type=layer_type, rotary_factor=rotary_factor, interleaved=interleaved),
        window=window,
        causal=flag(config, "is_causal", True),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )


def latent_attention(config: Config, *, bias: bool = False) -> LatentSpec:
    """Create DeepSeek's multi-head latent attention."""
    plain, rotary = (integer(config, f"qk_{name}_head_dim", maximum=MAX_HEAD_DIM) for name in ("nope", "rope"))
    rope = read_rope(config, rotary, interleaved=flag(config, "rope_interleave", True))
    if rope.rotary_dim != rotary:
        raise ModelError("'partial_rotary_factor' must be 1 for latent attention")
    fields = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scale = (plain + rotary) ** -0.5
    if rope.scaling != "default" and fields.get("mscale_all_dim"):
        scale *= yarn_magnitude(rope.factor, number(fields, "mscale_all_dim")) ** 2
    return LatentSpec(
        num_heads=integer(config, "num_attention_heads"),
        latent_dim=integer(config, "kv_lora_rank"),
        plain_dim=plain,
        value_dim=integer(config, "v_head_dim", maximum=MAX_HEAD_DIM),
        scale=scale,
        rope=rope,
        query_rank=0 if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        bias=bias,
    )


ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh", "relu2"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_tanh",  # old Gemma configurations; Gemma was trained with the tanh form
    "relu2": "relu2",
}


def num_layers(config: Config) -> int:
    return integer(config, "num_hidden_layers", maximum=MAX_LAYERS)


def dense(
    config: Config,
    *,
    bias: bool = False,
    activations: Sequence[str] = ("silu", "swish"),
    gated: bool = True,
    fused: str = "",
) -> DenseSpec:
    """Create a dense MLP. activations: those that the family supports, the default first."""
    name = config.get("hidden_activation") or config.get("hidden_act", activations[0])
    if name not in activations:
        raise ModelError(f"'hidden_act' {name!r} is not supported; supported: {activations[0]}")
    size = integer(config, "intermediate_size")
    return DenseSpec(intermediate_size=size, bias=bias, activation=ACTIVATIONS[name], gated=gated, fused=fused)


def decoder(
    config: Config,
    mixer: Mixer | Sequence[Mixer],
    mlp: DenseSpec | MoESpec | Sequence[DenseSpec | MoESpec],
    *,
    windows: Sequence[int] | None = None,
    norms: Norms | None = None,
    eps_name: str = "rms_norm_eps",
) -> ModelSpec:
    """Create a decoder whose layers differ only in mixers, windows or MLPs, if these are given per layer."""
    mixers = [mixer] * num_layers(config) if isinstance(mixer, Mixer) else list(mixer)
    mlps = [mlp] * len(mixers) if isinstance(mlp, DenseSpec | MoESpec) else mlp
    if windows is not None:
        mixers = [
            replace(each, window=window) if isinstance(each, AttentionSpec) else each
            for each, window in zip(mixers, windows, strict=True)
        ]
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ModelError(f"'dtype' must be bfloat16, float16 or float32, got {dtype!r}")
    bos = token_ids(config, "bos_token_id")
    return ModelSpec(
        architecture=config["architectures"][0],
        hidden_size=integer(config, "hidden_size"),
        vocab_size=integer(config, "vocab_size"),
        layers=tuple(
            LayerSpec(mixer=each, mlp=its, norms=norms or Norms()) for each, its in zip(mixers, mlps, strict=True)
        ),
        norm_eps=number(config, eps_name, 1e-6),
        context_length=context_length(config, mixers[-1].rope or next((m.rope for m in mixers if m.rope), None)),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        dtype=dtype,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(config, "eos_token_id"),
        num_draft_layers=max(
            integer(config, name, 0, minimum=0, maximum=MAX_LAYERS)
            for name in ("num_nextn_predict_layers", "num_mtp_modules")
        ),
        quantization=read_quantization(config.get("quantization_config")),
    )


def with_names(spec: ModelSpec, names: Renames, *, unused: Sequence[str] = ()) -> ModelSpec:
    """Return the specification for a checkpoint with other names: see `ModelSpec.names` and `unused`."""
    names = (*names, *spec.names)
    quantization = spec.quantization and replace(spec.quantization, names=names)
    return replace(spec, names=names, quantization=quantization, unused=(*unused, *spec.unused))


def slides(config: Config, pattern: int = 0) -> list[bool]:
    """Return which layers have the sliding window: by `layer_types`, else all except every `pattern`-th; 0: none."""
    count, types = num_layers(config), config.get("layer_types")
    if types is None:
        return [pattern > 0 and (layer + 1) % pattern != 0 for layer in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise ModelError(f"'layer_types' must be a list of num_hidden_layers={count} names, got {types!r}")
    if unknown := sorted({str(name) for name in types} - {"full_attention", "sliding_attention"}):
        raise ModelError(f"'layer_types' may name full_attention and sliding_attention, got {', '.join(unknown)}")
    return [name == "sliding_attention" for name in types]


def windows_of(config: Config, slides: Sequence[bool], default: int | None = None) -> list[int]:
    """Return the window of each layer; 0: none."""
    window = integer(config, "sliding_window", default) if any(slides) else 0
    return [window if slide else 0 for slide in slides]
