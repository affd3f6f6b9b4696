"""Families with state-space layers (Mamba-2) beside attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import MAX_HEAD_DIM, attention, decoder, dense, num_layers, with_names
from engine.models.families.experts import deepseek_mlps, granite_moe
from engine.models.families.fields import Config, flag, integer, number
from engine.models.families.hybrid import MAX_KERNEL
from engine.models.recurrent_spec import Mamba2Spec
from engine.models.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoESpec, Norms

STATE_LAYERS = "linear_attention", "mamba"
ATTENTION_LAYERS = "full_attention", "attention"
NO_MLP = Norms(before_mlp="")
# Granite's shared expert is the only MLP of models without experts.
GRANITE_NAMES = ((".shared_mlp.", ".mlp."),)
BAMBA_NAMES = (
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    (".final_layernorm.", ".norm."),
)


def granite_hybrid(config: Config) -> ModelSpec:
    """Granite 4 H: state-space layers and attention without RoPE, Granite's multipliers, experts or one MLP."""
    defaults: Config = {"num_local_experts": 8, "shared_intermediate_size": 1024}
    config = defaults | config
    shared = integer(config, "shared_intermediate_size")
    has_experts = integer(config, "num_local_experts", minimum=0) > 0
    spec = granite_moe(config if has_experts else {**config, "num_local_experts": 1, "num_experts_per_tok": 1})
    kinds = _kinds(config, [STATE_LAYERS[0]] * num_layers(config))
    mamba = _mamba(config, "mamba_", norm_groups=1)
    rotates = config.get("position_embedding_type") == "rope"
    mlp = DenseSpec(intermediate_size=shared)
    if not flag(config, "separate_experts"):
        mlp = replace(mlp, fused="input_linear", down_name="output_linear")
    layers = []
    for layer, kind in zip(spec.layers, kinds, strict=True):
        assert isinstance(layer.mixer, AttentionSpec)
        mixer = layer.mixer if rotates else replace(layer.mixer, rope=None)
        layers.append(
            replace(layer, mixer=mamba if kind in STATE_LAYERS else mixer, mlp=layer.mlp if has_experts else mlp)
        )
    spec = replace(spec, layers=tuple(layers))
    return spec if has_experts else with_names(spec, GRANITE_NAMES)


def bamba(config: Config) -> ModelSpec:
    """Bamba: state-space layers, attention with RoPE on half of each head in a few."""
    indices = config.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(isinstance(index, int) for index in indices):
        raise ModelError(f"'attn_layer_indices' must be a list of layers, got {indices!r}")
    kinds = [ATTENTION_LAYERS[0] if i in indices else STATE_LAYERS[0] for i in range(num_layers(config))]
    mamba, bias = _mamba(config, "mamba_", norm_groups=1), flag(config, "attention_bias")
    mixer = attention({"num_key_value_heads": 8} | config, qkv_bias=bias, o_bias=bias, rotary_factor=0.5)
    mixers = [mamba if kind in STATE_LAYERS else mixer for kind in _kinds(config, kinds)]
    spec = decoder(config | {"rms_norm_eps": number(config, "rms_norm_eps", 1e-5)}, mixers, dense(config))
    return with_names(spec, BAMBA_NAMES)


def falcon_h1(config: Config) -> ModelSpec:
    """Falcon-H1: a state-space layer and attention read the same input in each layer; muP's multipliers.

    Each layer becomes two: the first has the state-space layer, the second all else.
    """
    config = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5} | config
    normed = flag(config, "mamba_rms_norm")
    groups = integer(config, "mamba_n_groups", 1) if normed else 0
    scales = [each * number(config, "ssm_in_multiplier", 1.0) for each in _multipliers(config, "ssm_multipliers", 5)]
    mamba = replace(
        _mamba(config, "mamba_", norm_groups=groups),
        gate_first=not flag(config, "mamba_norm_before_gate", True),
        out_bias=flag(config, "projectors_bias"),
        scales=(scales[0], scales[1], scales[2], scales[3], scales[4]),
    )
    if flag(config, "attention_bias") or flag(config, "mlp_bias"):
        raise ModelError("'attention_bias' and 'mlp_bias' must be false")
    mixer, scale = attention(config), number(config, "attention_in_multiplier", 1.0)
    mixer = replace(mixer, scale=mixer.scale * scale * scale * number(config, "key_multiplier", 1.0))
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    mlp = replace(dense(config), gate_multiplier=gate)
    spec = decoder(config, mixer, mlp)
    own = spec.layers[0]
    first = LayerSpec(
        mixer=mamba,
        mlp=None,
        norms=NO_MLP,
        lends_input=True,
        residual_multiplier=number(config, "ssm_out_multiplier", 1.0),
    )
    second = replace(
        own,
        norms=Norms(before_mixer=""),
        residual_multiplier=scale * number(config, "attention_out_multiplier", 1.0),
        mlp_multiplier=down,
    )
    names = [
        (f".layers.{i}.{theirs}.", f".layers.{2 * i + (theirs in LAST_OF_FALCON)}.{ours}.")
        for i in reversed(range(num_layers(config)))
        for theirs, ours in FALCON_PARTS.items()
    ]
    spec = replace(
        spec,
        layers=(first, second) * num_layers(config),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        logits_multiplier=number(config, "lm_head_multiplier", 1.0),
    )
    return with_names(spec, (*names, (".final_layernorm.", ".norm.")))


FALCON_PARTS = {
    "mamba": "mamba",
    "input_layernorm": "input_layernorm",
    "self_attn": "self_attn",
    "feed_forward": "mlp",
    "pre_ff_layernorm": "post_attention_layernorm",
}
LAST_OF_FALCON = "self_attn", "feed_forward", "pre_ff_layernorm"


def nemotron_h(config: Config) -> ModelSpec:
    """Nemotron-H and Nemotron 3: each layer is a state-space layer, attention without RoPE, an MLP or experts.

    A mixer and the MLP after it become one layer.
    """
    config = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "norm_eps": number(config, "layer_norm_epsilon", 1e-5),
    } | config
    kinds = _nemotron_kinds(config)
    config["num_hidden_layers"] = len(kinds)
    mamba = _mamba(config, "mamba_", norm_groups=integer(config, "n_groups", 8))
    bias = flag(config, "attention_bias")
    mixer = replace(attention(config, qkv_bias=bias, o_bias=bias), rope=None)
    mlps: dict[str, DenseSpec | MoESpec] = {}
    names: list[tuple[str, str]] = [
        ("backbone.", "model."),
        ("model.embeddings.", "model.embed_tokens."),
        (".norm_f.", ".norm."),
    ]
    layers: list[LayerSpec] = []
    for i, kind in enumerate(kinds):
        if kind in ("mlp", "moe"):
            if not layers or layers[-1].mlp is not None:
                raise ModelError(f"layer {i}, an MLP, must follow a mixer: {kinds}")
            mlps.setdefault(kind, _nemotron_mlp(config, kind))
            layers[-1] = replace(layers[-1], mlp=mlps[kind], norms=Norms())
            part, norm = "mlp", "post_attention_layernorm"
        else:
            is_state = kind in STATE_LAYERS
            layers.append(LayerSpec(mixer=mamba if is_state else mixer, mlp=None, norms=NO_MLP))
            part, norm = "mamba" if is_state else "self_attn", "input_layernorm"
        at = len(layers) - 1
        names += [(f".layers.{i}.mixer.", f".layers.{at}.{part}."), (f".layers.{i}.norm.", f".layers.{at}.{norm}.")]
    config = {**config, "num_hidden_layers": len(layers)}
    spec = decoder(config, [layer.mixer for layer in layers], DenseSpec(intermediate_size=1), eps_name="norm_eps")
    return with_names(replace(spec, layers=tuple(layers)), tuple(names), unused=("mtp.",))


def _nemotron_mlp(config: Config, kind: str) -> DenseSpec | MoESpec:
    activation = config.get("mlp_hidden_act", "relu2")
    plain = dense(
        {**config, "hidden_act": activation}, bias=flag(config, "mlp_bias"), activations=("relu2",), gated=False
    )
    if kind == "mlp":
        return plain
    mlp = deepseek_mlps({**config, "first_k_dense_replace": 0, "hidden_act": "silu"})[0]
    assert isinstance(mlp, MoESpec)
    size = integer(config, "moe_shared_expert_intermediate_size", 7688)
    latent = 0 if config.get("moe_latent_size") is None else integer(config, "moe_latent_size")
    return replace(mlp, activation="relu2", latent=latent, shared=replace(plain, intermediate_size=size))


def _nemotron_kinds(config: Config) -> list[str]:
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None:
        letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        pattern = config.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or set(pattern) - letters.keys():
            raise ModelError(f"'hybrid_override_pattern' must be letters of {''.join(letters)}, got {pattern!r}")
        kinds = [letters[letter] for letter in pattern]
    known = {*STATE_LAYERS, *ATTENTION_LAYERS, "mlp", "moe"}
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise ModelError(f"'layers_block_type' must be a list of {', '.join(sorted(known))}, got {kinds!r}")
    _check_attends(kinds)
    return kinds


def _kinds(config: Config, default: Sequence[str]) -> Sequence[str]:
    """Return the kind of each layer: by `layer_types` or `layers_block_type`."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or default
    count, known = num_layers(config), (*STATE_LAYERS, *ATTENTION_LAYERS)
    if not isinstance(kinds, Sequence) or len(kinds) != count or not all(kind in known for kind in kinds):
        raise ModelError(f"'layer_types' must be a list of num_hidden_layers={count} names of {', '.join(known)}")
    _check_attends(kinds)
    return kinds


def _check_attends(kinds: Sequence[str]) -> None:
    if not set(kinds) & set(ATTENTION_LAYERS):
        raise ModelError("at least one layer must attend: models without attention are not supported")


def _mamba(config: Config, prefix: str, *, norm_groups: int) -> Mamba2Spec:
    """Create the state-space layers. norm_groups: see `Mamba2Spec.num_norm_groups`."""

    def first(names: Sequence[str], default: int, maximum: int) -> int:
        name = next((name for name in names if config.get(name) is not None), names[0])
        return integer(config, name, default, maximum=maximum)

    heads = first(("mamba_n_heads", "mamba_num_heads"), 128, 1 << 16)
    inner = config.get("mamba_d_ssm") or int(
        number(config, "mamba_expand", number(config, "expand", 2.0)) * integer(config, "hidden_size")
    )
    size = config.get("mamba_d_head")
    if size in (None, "auto"):
        size = config.get("mamba_head_dim") or inner // heads
    if not isinstance(size, int) or not 0 < size <= MAX_HEAD_DIM:
        raise ModelError(f"'mamba_d_head' must be an integer from 1 to {MAX_HEAD_DIM}, got {size!r}")
    groups = first(("mamba_n_groups", "n_groups"), 1, heads)
    if heads % groups or (norm_groups and heads * size % norm_groups):
        raise ModelError(f"'mamba_n_heads' ({heads}) must be a multiple of 'mamba_n_groups' ({groups})")
    return Mamba2Spec(
        num_heads=heads,
        head_dim=size,
        num_groups=groups,
        state_dim=first(("mamba_d_state", "ssm_state_size"), 256, MAX_HEAD_DIM),
        kernel_size=integer(config, "mamba_d_conv", integer(config, "conv_kernel", 4), minimum=2, maximum=MAX_KERNEL),
        norm_eps=number(config, "rms_norm_eps", number(config, "layer_norm_epsilon", 1e-5)),
        num_norm_groups=norm_groups,
        conv_bias=flag(config, "mamba_conv_bias", flag(config, "use_conv_bias", True)),
        in_bias=flag(config, "mamba_proj_bias", flag(config, "use_bias")),
        out_bias=flag(config, "mamba_proj_bias", flag(config, "use_bias")),
        limits=_limits(config),
    )


def _limits(config: Config) -> tuple[float, float]:
    """Return the least and the greatest step; transformers writes infinity as an object."""
    values = config.get("time_step_limit") or [0.0, math.inf]
    if isinstance(values, list):
        values = [math.inf if value == {"__float__": "Infinity"} else value for value in values]
    if not isinstance(values, list) or len(values) != 2 or not all(isinstance(x, int | float) for x in values):
        raise ModelError(f"'time_step_limit' must be two numbers, got {values!r}")
    return float(values[0]), float(values[1])


def _multipliers(config: Config, name: str, count: int) -> list[float]:
    values = config.get(name) or [1.0] * count
    if not isinstance(values, list) or len(values) != count or not all(isinstance(x, int | float) for x in values):
        raise ModelError(f"{name!r} must be {count} numbers, got {values!r}")
    return [float(value) for value in values]
